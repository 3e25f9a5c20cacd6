"""A run loses a node, which a spare replaces: it ends with the bits of an undisturbed run."""

import pytest
from support.cluster import SLOW_STEPS, TWO_RANKS_HERE, VERY_FEW_EPOCHS, Site, assert_ended_as, dead

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_spare_replaces_a_lost_node(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=2", "--spares=1", *VERY_FEW_EPOCHS, **SLOW_STEPS)
    undisturbed = site.submit("--data=data", "--name=undisturbed", *VERY_FEW_EPOCHS, *TWO_RANKS_HERE)
    run.wait_for_more_steps()
    nodes = run.nodes()
    # The first two that are ready train.
    [first] = [event["members"] for event in run.events("rendezvous")]
    [spare] = {0, 1, 2} - set(first)
    gone = next(rank for rank in first if rank != 0)
    with dead(site, nodes[gone]):
        status = run.wait_for_state("completed")
    assert_ended_as(run, undisturbed)

    [attempt] = status["attempts"]
    assert (attempt["cause"], attempt["job_id"]) == ("completed", run.job_id)
    second = [*(rank for rank in first if rank != gone), spare]
    assert [event["members"] for event in run.events("rendezvous")] == [first, second]
    [lost] = status["interruptions"]
    assert (lost["cause"], lost["node"]) == ("node_failure", nodes[gone])
    assert lost["steps_lost"] <= 6, "the snapshot interval and the step under way"
