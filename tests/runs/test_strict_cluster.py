"""Runs of a user who may have one job at a time, which can be neither requeued nor changed."""

from collections.abc import Iterator

import pytest
from support.cluster import SLOW_STEPS, VERY_FEW_EPOCHS, Site, assert_loses_a_node, preempt

pytestmark = [pytest.mark.slurm, pytest.mark.profile("strict"), pytest.mark.timeout(400)]


@pytest.fixture
def user(ordinary_user: Site, site: Site) -> Iterator[Site]:
    """The user with an account, which has the limit; root's has none."""
    site.slurm("sacctmgr", "--immediate", "add", "user", str(ordinary_user.user), "account=users")
    yield ordinary_user
    ordinary_user.end_all_jobs()
    site.slurm("sacctmgr", "--immediate", "delete", "user", str(ordinary_user.user))


def test_run_that_is_preempted_and_loses_its_first_node_continues_in_the_place_of_its_job(
    user: Site, site: Site
) -> None:
    run = user.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, **SLOW_STEPS)
    run.wait_for_more_steps()
    second = user.type("sbatch", "--output=/dev/null", "--wrap=sleep 1")
    assert "violates accounting/QOS policy" in second.stderr
    for refused in (("requeue", run.job_id), ("update", f"JobId={run.job_id}", "ExcNodeList=gpu04")):
        assert user.type("scontrol", *refused).returncode != 0
    preempt(run, site)
    preempted, again, _ = assert_loses_a_node(site, run, 2, place=0)
    assert preempted["cause"] == "preempted"
    assert preempted["job_id"] != again["job_id"]
