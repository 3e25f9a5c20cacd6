"""Runs where nothing is kind to them: no grace time, JobRequeue=0, no accounting, jobs of at most five minutes."""

import pytest
from support.cluster import SLOW_STEPS, VERY_FEW_EPOCHS, Site, assert_loses_a_node, preempt

PROFILE = "bare"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_run_that_is_preempted_and_loses_a_node_completes(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, **SLOW_STEPS)
    assert run.queue("%l") == "5:00", "the most that the partition allows, not its default"
    run.wait_for_more_steps()
    preempt(run)
    # Slurm requeues the job: with JobRequeue=0 because the script asks for it.
    run.wait_for_release()
    # The new job starts long before Slurm notices that the node is dead, after five minutes.
    assert assert_loses_a_node(site, run, 2)[0]["cause"] == "preempted"
