"""Runs where nothing is kind to them: no grace time, JobRequeue=0, no accounting, jobs of at most five minutes."""

import pytest
from cluster import PAIR, TINY_BATCH, Site

PROFILE = "bare"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400), pytest.mark.usefixtures("profile")]


def test_preempted_run_completes(site: Site) -> None:
    run = site.submit("--data=data", *PAIR, *TINY_BATCH, "--epochs=5", "--log-every=1", "--checkpoint-every=5")
    assert run.queue("%l") == "5:00", "the most that the partition allows, not its default"
    run.wait_for_steps(20)
    site.slurm("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    # Slurm requeues the job: with JobRequeue=0 because the script asks for it.
    run.wait_for_release()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["preempted", "completed"]
    assert run.attempts_logged() == [1, 2]
    assert set(run.steps()) == set(range(1, 5 * 118 + 1))
