"""What sbatch and srun are told: pure, so no cluster is needed."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.cluster import ROOT
from support.events import recovery_of, resources_of, script_spec
from support.fake_slurm import write_programs
from support.waiting import wait_for

from hpc.base.errors import UserError
from hpc.base.kernel import ENDING_SIGNALS
from hpc.run.events.history import History
from hpc.run.events.kinds import Refused
from hpc.run.rundir import RunDir
from hpc.run.spec import Recovery, Resources, RunSpec
from hpc.slurm.executor import SlurmExecutor, last_resort, sbatch_parameters, setup, start_local
from hpc.submissions.user_code.code_copy import copy_packages, has_damaged_packages


@pytest.fixture(autouse=True)
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What submitit looks for before it writes a script."""
    monkeypatch.setenv("PATH", write_programs(tmp_path / "bin", srun="exit 1"))


def told(nodes: str, **recovery: Any) -> dict[str, Any]:
    resources = resources_of(nodes=nodes, gpus_per_node="2", cpus_per_gpu=3, time="2h")
    return sbatch_parameters(spec(resources, recovery_of(**recovery)))


def spec(resources: Resources, recovery: Recovery = Recovery()) -> RunSpec:  # noqa: B008 - frozen
    return script_spec(resources=resources, recovery=recovery)


def script(tmp_path: Path, **resources: Any) -> list[str]:
    return SlurmExecutor(RunDir(tmp_path), spec(resources_of(**resources))).script().splitlines()


def test_what_is_asked_for_in_the_script(tmp_path: Path) -> None:
    lines = script(tmp_path, gpus_per_node="a100:2", cpus_per_gpu=3, sbatch=("exclusive", "comment=a b=c"))
    assert {"#SBATCH --gpus-per-node=a100:2", "#SBATCH --cpus-per-task=6"} <= set(lines)
    assert {"#SBATCH --exclusive", "#SBATCH --comment='a b=c'"} <= set(lines)
    lines = script(tmp_path, gpus_per_node="0", cpus_per_gpu=3)
    assert "#SBATCH --cpus-per-task=3" in lines
    assert not any(line.startswith(("#SBATCH --gpu", "#SBATCH --gres")) for line in lines)


def test_only_binding_that_was_asked_for_is_obeyed(tmp_path: Path) -> None:
    def unset(**resources: Any) -> set[str]:
        [line] = [line for line in script(tmp_path, **resources) if line.startswith("unset ")]
        return set(line.split()[1:])

    names = {f"SLURM_{name}" for name in ("CPU_BIND", "GPU_BIND", "GPUS_PER_TASK", "TRES_PER_TASK", "TRES_BIND")}
    assert names <= unset()
    assert unset() - unset(sbatch=("gpu-bind=closest",)) == {"SLURM_GPU_BIND"}
    assert unset(gpus_per_node="0") - unset() == {"SLURM_GPUS_PER_NODE"}


def test_job_of_several_nodes_survives_a_lost_node_and_slurm_requeues_one_of_one_node() -> None:
    for nodes, spares in (("2", 0), ("1:2", 0), ("1", 1)):
        parameters = told(nodes, spares=spares)
        assert parameters["additional_parameters"]["no-kill"] is True
        assert {"--no-kill", "--kill-on-bad-exit=0"} <= set(parameters["srun_args"])
    parameters = told("1")
    assert "no-kill" not in parameters["additional_parameters"]
    assert "--kill-on-bad-exit=1" in parameters["srun_args"]


def exported(*lines: str, **environment: str) -> dict[str, str]:
    """What a program gets that the batch script starts after these lines of --setup."""
    script = "\n".join([*setup(RunDir(Path("/runs/r")), Resources(setup=lines)), "env -0"])
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": os.environ["PATH"], **environment}, capture_output=True, check=True
    )
    return dict(entry.split("=", 1) for entry in done.stdout.decode().split("\0") if entry)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("export X='a  \"b\"'", 'a  "b"'),
        ('export X="it\'s $Y"', "it's y"),
        ("export X=`echo $Y`!", "y!"),
        ("if true\nthen export X=a; fi", "a"),
        ("set -eu; export X=${Y}", "y"),
    ],
)
def test_line_of_setup_is_what_was_typed(line: str, value: str) -> None:
    got = exported("Y=y", line, "export Z=z")
    assert (got["X"], got["Z"]) == (value, "z")


def test_module_is_a_function_that_the_submission_has_exported() -> None:
    lmod = {"BASH_FUNC_module%%": "() { export LOADED=$2; }"}
    assert exported("module load cuda/12.4", **lmod)["LOADED"] == "cuda/12.4"


def test_path_of_python_modules_from_setup_is_for_the_ranks_of_a_script() -> None:
    assert exported("export PYTHONPATH=/a:$PYTHONPATH", PYTHONPATH="/b")["TORCHRELAY_PYTHONPATH"] == "/a:/b"
    assert exported("true")["TORCHRELAY_PYTHONPATH"] == ""


def test_job_with_damaged_packages_ends_and_says_so(tmp_path: Path) -> None:
    """An agent whose file is empty would end with exit code 0, as if it had done its work."""
    run = RunDir(tmp_path / "50% done's")
    for directory in (run.path, run.events):
        directory.mkdir()
    copy_packages(run)
    start = "\n".join(SlurmExecutor(run, spec(Resources())).script().splitlines()).partition("\nsrun ")[0]
    job = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}

    def begin() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["bash", "-c", start], env=job, capture_output=True, text=True, check=False)

    assert (begin().returncode, has_damaged_packages(run)) == (0, False)
    run.packages.write_bytes(b"")
    done = begin()
    assert (done.returncode, has_damaged_packages(run)) == (1, True)
    assert "torchrelay: start 2 of job 7" in done.stdout
    [refused] = History.load(run).of(Refused)
    assert (refused.job_id, refused.restart) == ("7", 2)
    assert refused.detail in done.stdout
    assert refused.detail.endswith("--new-code")
    run.package_checksums.write_text("")
    assert (begin().returncode, has_damaged_packages(run)) == (1, True)


@pytest.mark.parametrize("lines", ["after srun", "in --setup"])
def test_signals_do_not_end_the_last_resort(tmp_path: Path, lines: str) -> None:
    """It gets all signals until it has ended by itself, with the exit code that it was to return."""
    run = RunDir(tmp_path)
    run.packages.parent.mkdir(parents=True)
    run.packages.symlink_to(ROOT)
    script = setup(run, Resources(setup=("exit 7",))) if lines == "in --setup" else ["(exit 7)", *last_resort(run)]
    job = {"JOB_ID": "7", "NTASKS": "1", "JOB_NUM_NODES": "1", "NODEID": "0", "PROCID": "0", "LOCALID": "0"}
    environment = {**os.environ, "SUBMITIT_EXECUTOR": "slurm", **{f"SLURM_{name}": job[name] for name in job}}
    with subprocess.Popen(
        ["bash", "-c", "\n".join(script)], env=environment, stdout=subprocess.PIPE, start_new_session=True
    ) as started:
        wait_for(lambda: b"jobs.last_resort" in Path(f"/proc/{started.pid}/cmdline").read_bytes().split(b"\0"))
        while started.poll() is None:
            for number in ENDING_SIGNALS:
                os.killpg(started.pid, number)
        assert started.returncode == 7


def test_local_run_that_does_not_start_says_why(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    with pytest.raises(UserError, match=r"the local run did not start: .*spec-?\d*\.json"):
        start_local(run)
