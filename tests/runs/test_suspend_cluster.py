"""Runs on a cluster that suspends the jobs that it preempts, and resumes them later."""

from pathlib import Path

import pytest
from support.cluster import SLOW_STEPS, VERY_FEW_EPOCHS, Site, assert_loses_a_node, ranks_of

PROFILE = "suspend"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def state_of(process: int) -> str:
    """As in `ps`: T is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_preempted_run_stands_still_and_completes_though_it_loses_a_node(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, "--hang-timeout=5s", **SLOW_STEPS)
    run.wait_for_more_steps()
    # All CPUs, but not --exclusive: a node with a suspended job is none of its own. For longer than a rank or an agent
    # may be silent.
    whole = ("--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=8")
    site.slurm("sbatch", "--partition=urgent", *whole, "--output=/dev/null", "--wrap=sleep 20")
    run.wait("the suspension", lambda: run.queue("%T") == "SUSPENDED")
    suspended = run.status()
    assert (suspended["state"], suspended["reason"]) == ("pending", "suspended")
    assert len(ranks_of(run)) == 2
    run.wait("that the ranks stand still", lambda: {state_of(rank) for rank in ranks_of(run)} == {"T"}, seconds=10)
    run.wait_for_more_steps()
    status = run.status()
    [attempt] = status["attempts"]
    assert (attempt["job_id"], attempt["cause"], status["interruptions"]) == (run.job_id, None, [])
    assert not run.events("node_lost")
    assert_loses_a_node(site, run, 1)
