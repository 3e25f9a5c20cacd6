"""Runs on a cluster that gives each job a /tmp and a /dev/shm of its own, and deletes them with it."""

import json

import pytest
from support.cluster import THREE_EPOCHS, Site, assert_preempted, assert_survives_a_node, preempt

PROFILE = "private"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_preempted_run_completes(site: Site) -> None:
    run = site.submit(*THREE_EPOCHS)
    run.wait_for_steps(20)
    preempt(run)
    with site.supervised():
        assert_preempted(run)
    # The requeued job would fail if it started at once, but not on 26.05, where the setting has another name.
    may_start = "NamespaceType" in site.slurm("scontrol", "show", "config")
    assert bool(run.events("released")) == may_start
    assert (run.status()["job_id"] == run.job_id) == may_start
    staged = run.events("staged")
    assert all(event["per_job"] for event in staged)
    assert not any(event["reused"] for event in staged)


def test_run_that_lost_a_node_completes_in_a_new_job(site: Site) -> None:
    assert_survives_a_node(site)


def test_doctor_says_that_copies_go_with_the_job(site: Site) -> None:
    found = {one["check"]: one for one in json.loads(site.hpc("doctor", "--json").stdout)}
    assert found["private /tmp"]["value"] == "job_container/tmpfs"
    assert "every new job of a run copies the data again" in found["private /tmp"]["cost"]
