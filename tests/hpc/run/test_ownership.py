"""Whose a run is: with a second user, in a directory of runs that everybody can write to."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cluster import ROOT
from support.events import attempt_ended, claimed, recorded_run
from support.fake_slurm import write_programs

from hpc.__main__ import main
from hpc.base.errors import UserError
from hpc.run.ownership import check_is_own
from hpc.run.rundir import RunDir
from hpc.submissions.checks import check_runs_dir

Capture = pytest.CaptureFixture[str]
STRANGER = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a second user")
# Of a Slurm that has forgotten the jobs, and takes new ones.
CLIENTS = {
    "squeue": "echo asked >> {calls}; exit 0",
    "scontrol": 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1',
    "sinfo": 'case "$*" in *%P*%a*) echo "gpu*|up|1-00:00:00|n/a|1-infinite|4|8|gpu:4";; esac',
    "sacct": "exit 1",
    "scancel": 'echo "scancel $*" >> {calls}',
    "sbatch": 'echo "sbatch $*" >> {calls}; case "$*" in *--parsable*) echo 8;; *) echo Submitted batch job 8;; esac',
}


def by(uid: int, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, user=uid, group=uid, extra_groups=[], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


def make_run(path: Path, owner: int = 0) -> RunDir:
    """A run whose last attempt a node failure ended an hour ago, and whose job is gone."""
    hour_ago = time.time() - 3600
    run = recorded_run(path, claimed(hour_ago), attempt_ended(hour_ago, "node_failure", node="gpu01"))
    for directory in (run.logs, run.code):
        directory.mkdir()
    run.script.write_text(f"#!/bin/sh\necho {run.path}\n")
    run.environment.write_text("{}")
    for part in (path, *path.rglob("*")):
        os.chown(part, owner, owner)
    return run


@pytest.fixture
def runs(shared: Path) -> Path:
    path = shared / "runs"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture(autouse=True)
def calls(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a machine with these clients, which write down here how they were called."""
    path = shared / "calls"
    path.touch()
    path.chmod(0o666)
    clients = {name: text.replace("{calls}", str(path)) for name, text in CLIENTS.items()}
    monkeypatch.setenv("PATH", write_programs(shared / "bin", **clients))
    monkeypatch.setenv("SLURM_CONF", "/nonexistent")
    return path


def called(calls: Path, program: str) -> list[str]:
    return [line for line in calls.read_text().splitlines() if line.split()[0] == program]


def test_supervisor_submits_no_script_of_another_user(runs: Path, calls: Path, capsys: Capture) -> None:
    make_run(runs / "theirs", STRANGER)
    own = make_run(runs / "own")
    main(["supervise", "--once", "--json", "--runs-dir", str(runs)])
    printed = capsys.readouterr()
    assert [line.split()[-1] for line in called(calls, "sbatch")] == [str(own.script)]
    assert [(line["run"], line["action"]) for line in json.loads(printed.out)] == [("own", "resubmit")]
    assert f"run theirs is not yours alone: {runs}/theirs belongs to nobody" in printed.err


def test_status_of_another_users_run_is_what_its_directory_says(runs: Path, capsys: Capture) -> None:
    make_run(runs / "theirs", STRANGER)
    make_run(runs / "own")
    main(["status", "--json", "--runs-dir", str(runs)])
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    own, theirs = rows["own"], rows["theirs"]
    assert (theirs["state"], theirs["reason"]) == ("pending", None)
    assert theirs["warnings"][0].startswith("it belongs to nobody, so this is only what")
    assert own["reason"].startswith("its job is gone")
    assert not any("belongs to" in warning for warning in own["warnings"])


def test_what_acts_on_a_run_refuses_that_of_another_user(runs: Path, calls: Path, capsys: Capture) -> None:
    theirs = make_run(runs / "theirs", STRANGER)
    before = {path: path.stat().st_mtime_ns for path in theirs.path.rglob("*")}
    refusal = "belongs to nobody, and only the owner of a run can act on it"
    for words in (["cancel", str(theirs.path)], ["drill", str(theirs.path), "worker-kill", "--yes"]):
        assert main(words) != 0
        assert refusal in capsys.readouterr().err
    job = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "1", "SUBMITIT_LOCAL_NTASKS": "1"}
    task = {"SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_LOCALID": "0", "SUBMITIT_LOCAL_NNODES": "1"}
    agent = by(0, sys.executable, "-m", "jobs.agent", str(theirs.path), **job, **task)
    assert agent.returncode != 0
    assert refusal in agent.stdout + agent.stderr
    assert {path: path.stat().st_mtime_ns for path in theirs.path.rglob("*")} == before
    assert not called(calls, "scancel")


def test_what_only_reads_may_read_the_run_of_another_user(runs: Path, shared: Path, capsys: Capture) -> None:
    theirs, page = make_run(runs / "theirs", STRANGER), shared / "page"
    assert main(["logs", str(theirs.path)]) == 0
    assert main(["report", str(theirs.path), "--output", str(page)]) == 0
    assert (page / "index.html").exists()
    # Without --output it would write into the run, where a link of its owner may lead anywhere.
    (theirs.path / "report").symlink_to(page)
    assert main(["report", str(theirs.path)]) == 2
    assert "use --output" in capsys.readouterr().err


def give(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


def open_to_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def open_to_group(path: Path) -> None:
    os.chown(path, 0, STRANGER)
    path.chmod(path.stat().st_mode | 0o020)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("loosen", [give, open_to_all, open_to_group, link])
@pytest.mark.parametrize(
    "part", [".", "submit.sbatch", "environment.json", "spec.json", "spec-001.json", "events", "code"]
)
def test_every_part_is_the_owners_alone(shared: Path, loosen: Callable[[Path], Any], part: str) -> None:
    run = make_run(shared / "run")
    run.revised_spec(1).write_bytes(run.spec.read_bytes())
    check_is_own(run)
    loosen(run.path / part)
    with pytest.raises(UserError, match="run run is not yours alone: "):
        check_is_own(run)


def test_group_of_the_user_alone_may_write(shared: Path) -> None:
    run = make_run(shared / "run")
    run.script.chmod(0o664)
    check_is_own(run)


def test_run_of_a_user_who_shares_files_with_a_group_is_writable_by_nobody_else(runs: Path) -> None:
    flags = ("--synthetic", "--name=run", f"--runs-dir={runs}", "--gpus-per-node=1", "--batch-size=8")
    submit = (sys.executable, "-m", "hpc", "submit", *flags)
    done = by(STRANGER, "sh", "-c", 'umask 002; exec "$@"', "sh", *submit)
    assert done.returncode == 0, done.stderr
    loose = [path for path in [runs / "run", *(runs / "run").rglob("*")] if path.stat().st_mode & 0o022]
    assert loose == []


@pytest.mark.parametrize(
    ("mode", "owner", "refusal"),
    [
        (0o777, 0, r"is drwxrwxrwx, so other users may rename what is in it"),
        (0o1777, STRANGER, r"belongs to nobody, who could replace what is in it"),
    ],
)
def test_runs_directory_where_others_may_rename_is_refused(runs: Path, mode: int, owner: int, refusal: str) -> None:
    check_runs_dir(runs, on_cluster=True)
    os.chown(runs, owner, owner)
    runs.chmod(mode)
    with pytest.raises(UserError, match=rf"--runs-dir .*{refusal}.*; use a directory of your own"):
        check_runs_dir(runs, on_cluster=True)
