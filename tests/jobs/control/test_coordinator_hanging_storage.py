"""A coordinator whose run directory is on storage that answers nothing: who reads from it waits in the kernel."""

import pytest
from support.events import attempt_ended, resources_of, write_events
from support.reported_nodes import AttemptMaker
from support.staging_nodes import hanging

from jobs import node_attempt


@pytest.mark.timeout(60)
def test_coordinator_goes_on_while_the_storage_hangs(attempt: AttemptMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_attempt, "_HANGS_SECONDS", 0.5)
    cut_off = attempt(resources=resources_of(nodes="1:3"))
    for rank in range(3):
        cut_off.beat(rank, step=12)
    cut_off.poll()
    with hanging(cut_off.node.run.events):
        cut_off.nodes.silent[1] = 6.0
        cut_off.poll(5.0)
        assert (cut_off.members, cut_off.nodes.directive.round) == ((0, 2), 2), "the others go on without the lost node"
        for rank in (0, 2):
            cut_off.nodes.report(rank, round=2)
        cut_off.poll(1.0)
        cut_off.fail(2, round=2, started_at=cut_off.clock.now, cause="bad_node")
        assert (cut_off.members, cut_off.nodes.directive.round) == ((0,), 3)
    cut_off.node.storage.finish()
    assert {event["cause"] for event in cut_off.events("interruption")} == {"node_failure", "bad_node"}
    assert [event["round"] for event in cut_off.events("rendezvous")] == [2, 3], "what happened is recorded later"
    write_events(cut_off.node.run, attempt_ended(cause="node_failure"), file="attempt-001-end.jsonl")
    cut_off.nodes.report(0, round=3)
    cut_off.poll(5.0)
    assert cut_off.is_over(), "an answer is used again"
