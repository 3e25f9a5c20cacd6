"""A machine without Slurm trains only if that is meant. It is known by its PATH, which has no sbatch."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Run, Site
from support.events import resources_of

from hpc.base.errors import UserError
from hpc.run.rundir import RunDir
from hpc.submissions.resources import choose_cluster

NO_SLURM = {"PATH": "/nonexistent"}
SUBMIT = ("submit", "--synthetic", "--batch-size=8", "--name=run")
OF_SLURM: dict[str, Any] = {
    "partition": "gpu", "account": "me", "qos": "high", "constraint": "a100", "exclude": "gpu01",
    "sbatch": ("exclusive",), "mem": "64G", "time": "12h", "gpus_per_node": "a100:2",
}  # fmt: skip


@pytest.mark.parametrize(("flag", "value"), OF_SLURM.items())
def test_flag_of_slurms_is_refused(flag: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError) as refused:
        choose_cluster("auto", resources_of(**{flag: value}), in_terminal=True)
    given = value[0] if flag == "sbatch" else value
    assert str(refused.value) == (
        f"--{flag.replace('_', '-')} {given} needs Slurm, but there is no Slurm here (sbatch is not on the PATH): type "
        "this on a login node of the cluster, or leave it out and use --cluster local to train on this machine"
    )


def test_without_a_terminal_this_machine_must_be_asked_for(tmp_path: Path) -> None:
    here = Site(tmp_path, "/nonexistent")
    missing = "there is no Slurm here (sbatch is not on the PATH): use --cluster local"
    for asked, problem in (
        ((), f"{missing} to train on this machine"),
        (("--cluster=slurm",), f"--cluster slurm, but {missing}"),
    ):
        done = here.hpc(*SUBMIT, *asked, **NO_SLURM)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"hpc submit: {problem}\n")
    assert list(tmp_path.iterdir()) == []
    asked = here.hpc(*SUBMIT, "--cluster=local", "--partition=gpu", "--dry-run", **NO_SLURM)
    assert asked.returncode == 0
    assert "hpc submit: warning: --partition gpu has no effect: --cluster local has no Slurm\n" in asked.stderr


def test_in_a_terminal_the_first_line_names_this_machine(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for path in Path("/usr/bin").iterdir():
        if path.name != "sbatch":
            (programs / path.name).symlink_to(path)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hpc", *SUBMIT]
    environment = {**os.environ, "PATH": str(programs)}
    done = subprocess.run(
        command, stdin=theirs, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    here = os.uname().nodename
    said = re.fullmatch(rf"started run run on this machine, {here} \(\d+ CPUs?\), as process (\d+)(; .*)?", first)
    assert said, first
    Run(Site(tmp_path, "/nonexistent"), RunDir(tmp_path / "runs" / "run"), said[1]).cancel()
