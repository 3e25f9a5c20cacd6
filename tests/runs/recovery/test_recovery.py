"""Signals, cancellations, lost links and nodes on a real Slurm: a run goes on, and ends with the same weights.

tests/acceptance has preemptions, killed and hung ranks, spares, elastic runs and lost first nodes.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.cluster import (
    SLOW_STEPS,
    TWO_RANKS_HERE,
    VERY_FEW_EPOCHS,
    Run,
    Site,
    assert_ended_as,
    refused,
)

from hpc.slurm.client import TESTBED_DIRECTORY
from jobs.control.channel import LOST_SECONDS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def submit_undisturbed(site: Site) -> Run:
    """The same training as the test's, which runs meanwhile."""
    return site.submit("--data=data", "--name=undisturbed", *VERY_FEW_EPOCHS, *TWO_RANKS_HERE)


def send(run: Run, job_id: str, *names: str) -> None:
    """Bare signals to every process of the agents' step, as on clusters that send nothing else."""
    for name in names:
        run.site.slurm("scancel", f"--signal={name}", f"{job_id}.0")


def test_signals_and_cancellation_lose_no_step(site: Site) -> None:
    large = site.path / "data" / "large"
    with large.open("wb") as file:
        file.truncate(2 * 2**30)  # seconds of copying, no space
    run = site.submit(
        "--data=data", "--name=paused", "--nodes=2", *VERY_FEW_EPOCHS, "--continue-with=requeue", **SLOW_STEPS
    )
    run.wait("the staging", lambda: len(run.events("joined")) == 2)
    assert not run.events("staged"), "the copy was too quick for this test"
    large.unlink()
    send(run, run.job_id, "TERM")
    run.wait_for_next_job()

    undisturbed = submit_undisturbed(site)
    run.wait_for_more_steps(2)
    send(run, run.job_id, "USR2", "TERM", "TERM", "USR2")
    run.wait_for_next_job()
    assert len(run.events("requeued")) == 2, "one for each attempt, whatever the number of signals"

    # A requeue that Slurm refuses is replaced by a new job.
    run.wait_for_more_steps(3)
    site.slurm("scontrol", "update", f"JobId={run.job_id}", "Requeue=0")
    send(run, run.job_id, "TERM")
    run.wait("the new job", lambda: run.events("resubmitted"))
    [resubmitted] = run.events("resubmitted")
    assert resubmitted["job_id"] != run.job_id

    # A cancelled run is resumed; not while its job is there.
    run.wait_for_more_steps(4)
    busy = refused(site, "resume", "paused", "--time=2h")
    assert f"has job {resubmitted['job_id']}, which is running" in busy
    run.cancel()
    answer = json.loads(site.hpc("resume", "paused", "--time=2h", "--json").stdout)
    assert answer["changed"] == {"--time": "2h"}
    assert site.slurm("squeue", "--noheader", f"--jobs={answer['job_id']}", "--format=%l") == "2:00:00"

    status = run.wait_for_state("completed")
    assert_ended_as(run, undisturbed)
    causes = ["requeued", "time_limit", "requeued", "cancelled", "completed"]
    assert [attempt["cause"] for attempt in status["attempts"]] == causes
    jobs = [*[run.job_id] * 3, resubmitted["job_id"], answer["job_id"]]
    assert [attempt["job_id"] for attempt in status["attempts"]] == jobs
    assert status["steps_lost"] == 0
    assert [len(run.events(kind)) for kind in ("requeued", "resubmitted", "resumed")] == [2, 2, 1]


@contextmanager
def without_link(node: str) -> Iterator[None]:
    """A node that nobody reaches."""
    link = ("nsenter", f"--net={TESTBED_DIRECTORY / 'ns' / node}.net", "ip", "link", "set", "eth0")
    subprocess.run([*link, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run([*link, "up"], check=True)


def test_first_node_whose_link_is_lost_for_seconds(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, **SLOW_STEPS)
    run.wait_for_more_steps()
    head, other = run.nodes()
    # On idle nodes, a new job would start at once.
    busy = ("--nodes=2", "--exclusive", f"--exclude={head},{other}", "--output=/dev/null", "--wrap=sleep infinity")
    job = site.slurm("sbatch", "--parsable", *busy)
    run.wait("busy nodes", lambda: site.slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T") == "RUNNING")
    with without_link(head):
        time.sleep(LOST_SECONDS + 3)
        run.wait("the loss of the other node", lambda: run.events("node_lost"))
    run.wait("the restored ranks", lambda: len(run.events("train_started")) == 2)
    site.slurm("scancel", job)
    undisturbed = submit_undisturbed(site)
    assert [event["node"] for event in run.events("node_returned")] == [other]
    assert not run.events("resubmitted")
    status = run.wait_for_state("completed")
    assert_ended_as(run, undisturbed)
    assert [attempt["cause"] for attempt in status["attempts"]] == ["completed"]
    [interruption] = status["interruptions"]
    assert interruption["cause"] == "node_failure"
    assert interruption["steps_lost"] <= 6
