"""Runs on a cluster that cancels the jobs that it preempts, instead of requeueing them."""

import json

import pytest
from support.cluster import THREE_EPOCHS, Site, assert_preempted, assert_survives_a_node, preempt

PROFILE = "cancel"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_preempted_run_completes(site: Site) -> None:
    run = site.submit(*THREE_EPOCHS)
    run.wait_for_steps(20)
    preempt(run)
    run.wait_for_release()
    assert_preempted(run)


def test_run_that_lost_a_node_completes_in_a_new_job(site: Site) -> None:
    assert_survives_a_node(site)


def test_doctor_says_that_preempted_jobs_end(site: Site) -> None:
    found = {one["check"]: one for one in json.loads(site.hpc("doctor", "--json").stdout)}
    assert found["PreemptMode"]["value"] == "PreemptMode=CANCEL in partition gpu"
    assert found["PreemptMode"]["severity"] == "note"
