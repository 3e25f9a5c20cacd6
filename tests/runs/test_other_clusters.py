"""Runs on clusters that are configured otherwise: each is preempted, and goes on."""

import pytest
from support.cluster import SLOW_STEPS, VERY_FEW_EPOCHS, Run, Site, assert_loses_a_node, preempt, ranks_of

from hpc.base.kernel import process_state

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def training(site: Site, *flags: str) -> Run:
    """A run on two nodes that trains."""
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, *flags, **SLOW_STEPS)
    run.wait_for_more_steps()
    return run


# No grace time, JobRequeue=0, no accounting. The limit is the most that the partition allows, not its default; and the
# new job starts long before Slurm notices that the node is dead, after five minutes.
@pytest.mark.profile("bare")
def test_run_that_slurm_would_not_requeue_by_itself(site: Site) -> None:
    run = training(site)
    assert run.queue("%l") == "5:00"
    preempt(run)
    run.wait_for_next_job()
    assert assert_loses_a_node(site, run, 2)[0]["cause"] == "preempted"


@pytest.mark.profile("private")
def test_run_whose_jobs_have_a_tmp_of_their_own_that_is_deleted_with_them(site: Site) -> None:
    run = training(site, "--continue-with=requeue")
    preempt(run)
    with site.supervised():
        run.wait_for_more_steps(2)
    # The requeued job would fail if it started at once, but not on 26.05, where the setting has another name.
    may_start = "NamespaceType" in site.slurm("scontrol", "show", "config")
    assert bool(run.events("released")) == may_start
    preempted, again = run.wait_for_state("completed")["attempts"]
    assert preempted["cause"] == "preempted"
    assert (again["job_id"] == run.job_id) == may_start
    run.assert_no_gap()
    assert not any(event["reused"] for event in run.events("staged"))


@pytest.mark.profile("suspend")
def test_run_whose_job_is_suspended_stands_still(site: Site) -> None:
    run = training(site, "--hang-timeout=5s")
    # All CPUs, but not --exclusive: a node with a suspended job is none of its own. For longer than a rank or an agent
    # may be silent.
    whole = ("--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=8")
    end = site.path / "end"
    wrap = f"--wrap=sleep 20; until [ -e {end} ]; do sleep 0.2; done"
    site.slurm("sbatch", "--partition=urgent", *whole, "--output=/dev/null", wrap)
    run.wait("the suspension", lambda: run.queue("%T") == "SUSPENDED")
    suspended = run.status()
    assert (suspended["state"], suspended["reason"]) == ("pending", "suspended")
    assert len(ranks_of(run)) == 2
    run.wait("that the ranks stand still", lambda: {process_state(rank) for rank in ranks_of(run)} == {"T"})
    end.touch()
    run.wait_for_more_steps()
    status = run.status()
    [attempt] = status["attempts"]
    assert (attempt["job_id"], attempt["cause"], status["interruptions"]) == (run.job_id, None, [])
    assert not run.events("node_lost")
    run.wait_for_state("completed")
    run.assert_no_gap()
