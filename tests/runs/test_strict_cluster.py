"""Runs of a user who may have one job at a time, which can be neither requeued nor changed."""

import json
from collections.abc import Iterator

import pytest
from support.cluster import THREE_EPOCHS, Site, assert_continued, dead, preempt

PROFILE = "strict"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture
def user(ordinary_user: Site, site: Site) -> Iterator[Site]:
    """The user with an account, which has the limit; root's has none."""
    site.slurm("sacctmgr", "--immediate", "add", "user", str(ordinary_user.user), "account=users")
    yield ordinary_user
    ordinary_user.end_all_jobs()
    site.slurm("sacctmgr", "--immediate", "delete", "user", str(ordinary_user.user))


def test_preempted_run_continues_in_the_place_of_its_job(user: Site, site: Site) -> None:
    run = user.submit(*THREE_EPOCHS)
    run.wait_for_steps(20)
    second = user.type("sbatch", "--output=/dev/null", "--wrap=sleep 1")
    assert "violates accounting/QOS policy" in second.stderr
    for refused in (("requeue", run.job_id), ("update", f"JobId={run.job_id}", "ExcNodeList=gpu04")):
        assert user.type("scontrol", *refused).returncode != 0
    preempt(run, site)
    assert_continued(run, "preempted")


def test_run_of_one_node_continues_in_the_place_of_its_job(user: Site, site: Site) -> None:
    run = user.submit(*THREE_EPOCHS, "--nodes=1")
    run.wait_for_steps(20)
    preempt(run, site)
    assert_continued(run, "preempted")


def test_run_that_lost_its_head_node_continues_in_the_place_of_its_job(user: Site, site: Site) -> None:
    run = user.submit(*THREE_EPOCHS)
    run.wait_for_steps(20)
    with dead(site, run.nodes()[0]):
        assert_continued(run, "node_failure")


def test_doctor_names_the_limit(user: Site) -> None:
    found = {one["check"]: one for one in json.loads(user.hpc("doctor", "--json").stdout)}
    assert found["MaxSubmitJobs"]["value"].startswith("MaxSubmitJobs=1")
