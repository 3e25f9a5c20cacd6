"""Runs on a cluster that suspends the jobs that it preempts, and resumes them later."""

import json

import pytest
from cluster import PAIR, TINY_BATCH, Site, dead

PROFILE = "suspend"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400), pytest.mark.usefixtures("profile")]
WHOLE = ("--data=data", *PAIR, *TINY_BATCH, "--epochs=3", "--log-every=1", "--checkpoint-every=5", "--hang-timeout=5s")
STEPS = list(range(1, 3 * 118 + 1))


def test_preempted_run_stands_still_and_completes(site: Site) -> None:
    run = site.submit(*WHOLE)
    run.wait_for_steps(20)
    # All CPUs, but not --exclusive: a node with a suspended job is none of its own. For longer than a rank or an agent
    # may be silent.
    whole = ("--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=8")
    site.slurm("sbatch", "--partition=urgent", *whole, "--output=/dev/null", "--wrap=sleep 15")
    run.wait("the suspension", lambda: run.queue("%T") == "SUSPENDED")
    suspended = run.status()
    assert (suspended["state"], suspended["reason"]) == ("pending", "suspended")
    status = run.wait_for_state("completed")
    [attempt] = status["attempts"]
    assert (attempt["job_id"], attempt["cause"], status["interruptions"]) == (run.job_id, "completed", [])
    assert not run.events("node_lost")
    assert run.steps() == STEPS


def test_run_that_lost_a_node_completes_in_a_new_job(site: Site) -> None:
    run = site.submit(*WHOLE)
    run.wait_for_steps(20)
    with dead(site, run.status()["attempts"][0]["nodes"][1]):
        status = run.wait_for_state("completed")
    first, second = status["attempts"]
    assert (first["cause"], second["cause"]) == ("node_failure", "completed")
    assert first["job_id"] != second["job_id"]
    assert set(run.steps()) == set(STEPS)


def test_doctor_says_that_preempted_jobs_stand_still(site: Site) -> None:
    found = {one["check"]: one for one in json.loads(site.hpc("doctor", "--json").stdout)}
    assert found["PreemptMode"]["value"] == "PreemptMode=SUSPEND in partition gpu"
    assert "stands still" in found["PreemptMode"]["cost"]
