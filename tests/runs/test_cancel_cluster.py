"""Runs on a cluster that cancels the jobs that it preempts, instead of requeueing them."""

import pytest
from support.cluster import SLOW_STEPS, VERY_FEW_EPOCHS, Site, assert_loses_a_node, preempt

pytestmark = [pytest.mark.slurm, pytest.mark.profile("cancel"), pytest.mark.timeout(400)]


def test_run_that_is_preempted_and_loses_a_node_completes(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, **SLOW_STEPS)
    run.wait_for_more_steps()
    preempt(run)
    run.wait_for_next_job()
    assert assert_loses_a_node(site, run, 2)[0]["cause"] == "preempted"
