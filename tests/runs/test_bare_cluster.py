"""Runs where nothing is kind to them: no grace time, JobRequeue=0, no accounting, jobs of at most five minutes."""

import json

import pytest
from support.cluster import THREE_EPOCHS, Site, assert_preempted, assert_survives_a_node, preempt

PROFILE = "bare"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_preempted_run_completes(site: Site) -> None:
    run = site.submit(*THREE_EPOCHS)
    assert run.queue("%l") == "5:00", "the most that the partition allows, not its default"
    run.wait_for_steps(20)
    preempt(run)
    # Slurm requeues the job: with JobRequeue=0 because the script asks for it.
    run.wait_for_release()
    assert_preempted(run)
    assert run.attempts_logged() == [1, 2]


def test_run_that_lost_a_node_completes_in_a_new_job(site: Site) -> None:
    """Long before Slurm notices, after five minutes."""
    assert_survives_a_node(site)


def test_doctor_names_what_is_missing(site: Site) -> None:
    found = {one["check"]: one["value"] for one in json.loads(site.hpc("doctor", "--json").stdout)}
    assert found["preemption"] == "GraceTime=0: 15 s to save on preemption"
    assert found["SlurmdTimeout"] == "SlurmdTimeout=300 s"
    assert found["accounting"] == "Slurm accounting storage is disabled"
