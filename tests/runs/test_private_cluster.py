"""Runs on a cluster that gives each job a /tmp and a /dev/shm of its own, and deletes them with it."""

import pytest
from support.cluster import SLOW_STEPS, VERY_FEW_EPOCHS, Site, assert_loses_a_node, preempt

PROFILE = "private"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_run_that_is_preempted_and_loses_a_node_completes(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, **SLOW_STEPS)
    run.wait_for_more_steps()
    preempt(run)
    with site.supervised():
        run.wait_for_more_steps(2)
    # The requeued job would fail if it started at once, but not on 26.05, where the setting has another name.
    may_start = "NamespaceType" in site.slurm("scontrol", "show", "config")
    assert bool(run.events("released")) == may_start
    preempted, again, _ = assert_loses_a_node(site, run, 2)
    assert preempted["cause"] == "preempted"
    assert (again["job_id"] == run.job_id) == may_start
    staged = run.events("staged")
    assert all(event["per_job"] for event in staged)
    assert not any(event["reused"] for event in staged)
