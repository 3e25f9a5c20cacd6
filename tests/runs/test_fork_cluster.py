"""`hpc fork` of a run that trains, on Slurm, by an ordinary user."""

import json
import os
import signal
from pathlib import Path

import pytest
from support.cluster import ENDLESS, Run, Site, rank_pids

from hpc.base.files import read_json_lines
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]
EPOCH = 118  # steps


def stop_ranks(run: Run) -> list[int]:
    """Have all ranks stand still until they get SIGCONT. Returns their processes."""
    pids = [pid for node in run.nodes() for pid in rank_pids(run, node)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def assert_continues(run: Run, since: int, until: int) -> None:
    """It has trained the steps after `since` alone, and has the metrics of those before."""
    run.wait_for_state("completed")
    assert [event["step"] for event in run.events("train_started")] == [since]
    attempts = {line["step"]: line["attempt"] for line in read_json_lines(run.directory.train_metrics)}
    assert attempts == {**dict.fromkeys(range(1, since + 1), 0), **dict.fromkeys(range(since + 1, until + 1), 1)}


def test_fork_of_a_running_run_goes_on_from_its_checkpoint(ordinary_user: Site) -> None:
    source = ordinary_user.submit("--name=source", "--lr-scheduler=constant", "--data=data", *ENDLESS)
    source.wait_for_steps(20)
    pids = stop_ranks(source)
    epochs = source.steps()[-1] // EPOCH + 2
    saved = max(event["step"] for event in source.events("checkpoint_saved"))
    flags = ("--name=fork", "--lr=0.01", "--nodes=1", f"--epochs={epochs}", "--json")
    done = ordinary_user.hpc("fork", "source", *flags)
    assert done.returncode == 0, done.stderr
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    source.wait_for_steps(len(source.steps()) + 5)
    source.cancel()
    fork = Run(ordinary_user, RunDir(ordinary_user.path / "runs" / "fork"), json.loads(done.stdout)["job_id"])
    begin = int(Path(str(RunSpec.load(fork.directory).forked_from)).name.removeprefix("step-"))
    assert begin >= saved
    assert_continues(fork, begin, epochs * EPOCH)
