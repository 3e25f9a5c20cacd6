"""Runs on a cluster that cancels the jobs that it preempts, instead of requeueing them."""

import json

import pytest
from cluster import THREE_EPOCHS, THREE_EPOCHS_STEPS, Site, assert_continued, dead

PROFILE = "cancel"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400), pytest.mark.usefixtures("profile")]


def test_preempted_run_completes(site: Site) -> None:
    run = site.submit(*THREE_EPOCHS)
    run.wait_for_steps(20)
    site.slurm("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    run.wait_for_release()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["preempted", "completed"]
    assert set(run.steps()) == THREE_EPOCHS_STEPS


def test_run_that_lost_a_node_completes_in_a_new_job(site: Site) -> None:
    run = site.submit(*THREE_EPOCHS)
    run.wait_for_steps(20)
    with dead(site, run.nodes()[1]):
        assert_continued(run, "node_failure")


def test_doctor_says_that_preempted_jobs_end(site: Site) -> None:
    found = {one["check"]: one for one in json.loads(site.hpc("doctor", "--json").stdout)}
    assert found["PreemptMode"]["value"] == "PreemptMode=CANCEL in partition gpu"
    assert found["PreemptMode"]["severity"] == "note"
