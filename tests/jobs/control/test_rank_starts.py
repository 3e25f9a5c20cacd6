"""What the coordinator records of ranks that have all started, and of ranks that end before the others."""

import json

import pytest
from support.events import resources_of
from support.reported_nodes import AttemptMaker, CoordinatedAttempt

from jobs.control.messages import Phase

LOST_PEER = "RuntimeError: [pair.cc:561] Connection closed by peer [10.0.0.2]:22153"


def ended_early(attempt: AttemptMaker, restarts: int = 0) -> CoordinatedAttempt:
    """An attempt of three nodes, with a rank each, of which rank 1 has ended with exit code 0."""
    early = attempt(resources=resources_of(nodes="3", gpus_per_node="1"))
    early.start(ended=[1], restarts=restarts)
    early.poll()
    return early


def test_each_start_of_all_ranks_is_recorded_once(attempt: AttemptMaker) -> None:
    started = attempt(resources=resources_of(nodes="3", gpus_per_node="1"))
    started.nodes.report(0, starts=())
    started.poll()
    assert started.events("ranks_started") == []
    for restarts in (0, 0, 1):
        started.start(restarts=restarts)
        started.poll()
    assert started.events("ranks_started") == [
        {"round": 1, "restarts": restarts, "world_size": 3} for restarts in (0, 1)
    ]


def test_restarted_ranks_have_started_only_after_the_failure_is_recorded(attempt: AttemptMaker) -> None:
    failed = attempt(resources=resources_of(nodes="3", gpus_per_node="1"))
    failed.start()
    failed.poll()
    failed.start(restarts=1)
    failed.fail(2)
    kinds = [json.loads(line)["event"] for line in failed.node.writer.path.read_text().splitlines()]
    assert kinds[-3:] == ["ranks_started", "interruption", "ranks_started"]


def test_ranks_that_ended_are_recorded_while_the_others_run_on(attempt: AttemptMaker) -> None:
    early = ended_early(attempt)
    early.poll(9.0)
    assert early.events("ranks_ended") == [], "the others may end, too"
    early.poll(1.0)
    early.poll(100.0)
    early.start(ended=[0, 1])
    early.poll()
    early.poll(10.0)
    early.start(ended=[0, 1, 2])
    early.poll(100.0)
    assert [event["ranks"] for event in early.events("ranks_ended")] == [[1], [0, 1]]


@pytest.mark.parametrize(
    "detail",
    [
        LOST_PEER,
        "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
    ],
)
def test_same_early_end_twice_ends_the_attempt_with_both_ranks(attempt: AttemptMaker, detail: str) -> None:
    early = ended_early(attempt)
    # torchrun cannot restart the failed rank, because the other node's ranks have ended, and so it ends as well.
    early.nodes.report(2, phase=Phase.ENDED, exit_code=1)
    early.fail(2, detail=detail)
    [interruption] = early.events("interruption")
    assert interruption["detail"] == (
        "rank 2 on gpu03 failed while it waited for rank 1, which had ended with exit code 0: give every rank the same "
        f"number of steps (exit code 1: {detail})"
    )
    assert early.nodes.directive.round == 2
    for node_rank in early.members:
        early.nodes.report(node_rank, phase=Phase.RUNNING, round=2, exit_code=0, failures=())
    early.start(ended=[1])
    early.fail(2, detail=detail, round=2, started_at=early.clock.now + 1, failed_at=early.clock.now + 2)
    assert early.is_over()
    assert early.coordinator.failure is not None
    assert early.coordinator.failure.detail == interruption["detail"]


def test_failure_of_a_rank_that_did_not_wait_keeps_its_own_reason(attempt: AttemptMaker) -> None:
    early = ended_early(attempt)
    early.fail(2)
    [interruption] = early.events("interruption")
    reason = "exit code 1: ValueError: 12 is too much"
    assert interruption["detail"] == f"rank 2 on gpu03: {reason}; rank 1 has ended with exit code 0"
    assert interruption["signature"] == "1: ValueError: # is too much"


def test_rank_that_ended_before_the_last_restart_is_not_blamed(attempt: AttemptMaker) -> None:
    early = ended_early(attempt)
    early.fail(2, detail=LOST_PEER, restarts=1)
    [interruption] = early.events("interruption")
    assert interruption["detail"] == f"rank 2 on gpu03: exit code 1: {LOST_PEER}"


def test_failure_is_handled_before_the_next_round_begins(attempt: AttemptMaker) -> None:
    failed = attempt(resources=resources_of(nodes="3", gpus_per_node="1"))
    failed.nodes.report(2, phase=Phase.ENDED, exit_code=1)
    failed.fail(2)
    kinds = [json.loads(line)["event"] for line in failed.node.writer.path.read_text().splitlines()]
    assert kinds[-2:] == ["interruption", "rendezvous"]
