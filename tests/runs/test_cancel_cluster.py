"""Runs on a cluster that cancels the jobs that it preempts, instead of requeueing them."""

import json

import pytest
from cluster import PAIR, TINY_BATCH, Site, dead

PROFILE = "cancel"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400), pytest.mark.usefixtures("profile")]
WHOLE = ("--data=data", *PAIR, *TINY_BATCH, "--epochs=3", "--log-every=1", "--checkpoint-every=5")
STEPS = set(range(1, 3 * 118 + 1))


def test_preempted_run_completes(site: Site) -> None:
    run = site.submit(*WHOLE)
    run.wait_for_steps(20)
    site.slurm("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    run.wait_for_release()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["preempted", "completed"]
    assert set(run.steps()) == STEPS


def test_run_that_lost_a_node_completes_in_a_new_job(site: Site) -> None:
    run = site.submit(*WHOLE)
    run.wait_for_steps(20)
    with dead(site, run.status()["attempts"][0]["nodes"][1]):
        status = run.wait_for_state("completed")
    first, second = status["attempts"]
    assert (first["cause"], second["cause"]) == ("node_failure", "completed")
    assert first["job_id"] != second["job_id"]
    assert set(run.steps()) == STEPS


def test_doctor_says_that_preempted_jobs_end(site: Site) -> None:
    found = {one["check"]: one for one in json.loads(site.hpc("doctor", "--json").stdout)}
    assert found["PreemptMode"]["value"] == "PreemptMode=CANCEL in partition gpu"
    assert found["PreemptMode"]["severity"] == "note"
