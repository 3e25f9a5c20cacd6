"""`hpc fork` on Slurm, by an ordinary user: of a run that trains, and of one that is complete."""

import json

import pytest
from support.cluster import TINY_BATCH, TWO_NODES, Run, Site

from hpc.core.files import read_json_lines
from hpc.core.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
EPOCH = 118  # steps
EPOCHS = 8  # so many that the source still trains when it is forked


def fork(site: Site, source: Run, name: str, *flags: str) -> Run:
    done = site.hpc("fork", source.directory.name, f"--name={name}", "--json", *flags)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return Run(site, RunDir(site.path / "runs" / name), answer["job_id"])


def newest_saved(run: Run) -> int:
    return max(event["step"] for event in run.events("checkpoint_saved"))


def assert_continues(run: Run, since: int, until: int) -> None:
    """It has trained the steps after `since` alone, and has the metrics of those before."""
    run.wait_for_state("completed")
    assert [event["step"] for event in run.events("train_started")] == [since]
    attempts = {line["step"]: line["attempt"] for line in read_json_lines(run.directory.train_metrics)}
    assert attempts == {**dict.fromkeys(range(1, since + 1), 0), **dict.fromkeys(range(since + 1, until + 1), 1)}


def test_fork_of_a_running_and_of_a_complete_run_goes_on_from_the_newest_state(ordinary_user: Site) -> None:
    flags = ("--data=data", *TWO_NODES, *TINY_BATCH, "--log-every=1", "--checkpoint-every=5", "--lr-scheduler=constant")
    source = ordinary_user.submit("--name=source", f"--epochs={EPOCHS}", *flags)
    source.wait_for_steps(20)
    before = newest_saved(source)
    early = fork(ordinary_user, source, "early", "--lr=0.01", "--nodes=1")
    (from_checkpoint,) = [int(path.name.removeprefix("step-")) for path in early.directory.checkpoints.glob("step-*")]
    assert before <= from_checkpoint < EPOCHS * EPOCH
    assert_continues(early, from_checkpoint, EPOCHS * EPOCH)

    source.wait_for_state("completed")
    longer = fork(ordinary_user, source, "longer", f"--epochs={EPOCHS + 1}")
    assert_continues(longer, EPOCHS * EPOCH, (EPOCHS + 1) * EPOCH)
    assert source.status()["state"] == "completed"
