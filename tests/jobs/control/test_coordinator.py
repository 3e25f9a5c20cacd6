"""What the coordinator makes of failures: which it records, which end the attempt, and whom it leaves out."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.events import (
    attempt_ended,
    resources_of,
    train_started,
    write_events,
)  # fmt: skip
from support.reported_nodes import AttemptMaker, CoordinatedAttempt

from hpc.run.causes import Cause
from hpc.run.events.kinds import RankFailed
from hpc.run.spec import Recovery
from hpc.run.spec_file import script_program
from jobs.control.coordinator import Coordinator
from jobs.control.messages import Phase
from jobs.stop_request import STOP_SIGNALS

# --- lost nodes ---


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another test may have a Slurm with idle nodes, for which a silent node would be waited for less."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))


def test_lost_member_is_an_interruption_and_the_others_go_on(attempt: AttemptMaker) -> None:
    lost = attempt()
    lost.beat(0, step=12)
    lost.poll()
    lost.nodes.silent[1] = 6.0
    lost.poll()
    since = lost.clock.now - 6.0
    detail = "lost contact with gpu02"
    assert lost.events("node_lost") == [{"node": "gpu02", "last_heard": since, "detail": detail}]
    [one] = lost.events("interruption")
    assert (one["cause"], one["node"], one["rank"], one["signature"]) == ("node_failure", "gpu02", None, None)
    assert (one["step"], one["failed_at"], one["noticed_at"], one["detail"]) == (12, since, lost.clock.now, detail)
    assert (one["round"], one["pause_seconds"]) == (1, 0.0)
    assert lost.coordinator.lost == {1: since}
    assert lost.members == (0, 2)
    assert lost.events("rendezvous") == [{"round": 2, "port": 100, "members": [0, 2]}]
    directive = lost.nodes.directive
    assert (directive.round, directive.host, directive.port) == (2, "10.0.0.1", 100)
    assert not directive.paused
    assert not directive.preflight
    assert not directive.over
    lost.poll()
    assert len(lost.events("node_lost")) == len(lost.events("interruption")) == 1, "it is recorded once"


def test_node_that_comes_back_takes_part_again(attempt: AttemptMaker) -> None:
    back = attempt()
    back.nodes.silent[1] = 6.0
    back.poll()
    back.nodes.silent[1] = 0.0
    back.nodes.report(1, phase=Phase.READY)
    for rank in (0, 2):
        back.nodes.report(rank, round=2)
    back.poll()
    assert back.events("node_returned") == [{"node": "gpu02"}]
    assert back.coordinator.lost == {}
    assert back.members == (0, 2, 1), "members stay members"


@pytest.mark.parametrize("phase", [Phase.LEFT, Phase.FAILED, Phase.BAD_NODE])
def test_node_that_has_left_is_not_lost(attempt: AttemptMaker, phase: Phase) -> None:
    left = attempt()
    left.nodes.report(1, phase=phase)
    left.nodes.silent |= {0: 9.0, 1: 9.0}
    left.poll()
    assert not left.events("node_lost"), "nor is the first node, whose agent decides this"


def test_loss_of_a_spare_or_in_a_pause_interrupts_nothing(attempt: AttemptMaker) -> None:
    spare = attempt(resources=resources_of(nodes="1:2"))
    spare.nodes.directive = replace(spare.nodes.directive, members=(0, 1))
    spare.nodes.report(2, phase=Phase.READY)
    spare.nodes.silent[2] = 6.0
    spare.poll()
    assert [event["node"] for event in spare.events("node_lost")] == ["gpu03"]
    spare.nodes.directive = replace(spare.nodes.directive, paused=True)
    spare.nodes.silent[1] = 6.0
    spare.poll()
    assert [event["node"] for event in spare.events("node_lost")] == ["gpu03", "gpu02"]
    assert not spare.events("interruption")


def needing_a_silent_node(attempt: AttemptMaker) -> CoordinatedAttempt:
    """An attempt on Slurm that cannot go on without the second node, from which nothing is heard."""
    needed = attempt(resources=resources_of(nodes="3"))
    on_slurm = replace(needed.node, allocation=replace(needed.node.allocation, cluster="slurm"))
    needed.coordinator = Coordinator(on_slurm, cast("Any", needed.nodes), needed.stop)
    needed.nodes.silent[1] = 6.0
    return needed


def test_silent_node_is_waited_for_if_the_run_needs_it(attempt: AttemptMaker) -> None:
    needed = needing_a_silent_node(attempt)
    needed.poll()
    assert needed.nodes.directive.paused
    assert not needed.is_over()
    needed.nodes.silent[1] = 44.0
    needed.poll(38.0)
    assert not needed.is_over()
    needed.nodes.silent[1] = 45.0
    needed.poll(1.0)
    assert needed.is_over()
    assert needed.coordinator.failure is not None
    assert (
        needed.coordinator.failure.detail == "lost contact with gpu02; only 2 of 3 nodes can train, and the run needs 3"
    )


def test_node_whose_agent_has_ended_is_not_waited_for(attempt: AttemptMaker) -> None:
    needed = needing_a_silent_node(attempt)
    needed.nodes.ended.add(1)
    needed.poll()
    assert needed.is_over()


# --- failed ranks ---


@pytest.mark.parametrize(
    ("fields", "detail", "signature"),
    [
        ({}, "rank 1 on gpu02: exit code 1: ValueError: 12 is too much", "1: ValueError: # is too much"),
        ({"exit_code": -9, "signal": "SIGKILL", "detail": "x"}, "rank 1 on gpu02: signal SIGKILL: x", None),
        ({"cause": "out_of_memory", "exit_code": -9, "signal": "SIGKILL", "detail": ""},
         "rank 1 on gpu02: signal SIGKILL", "SIGKILL: "),
        ({"signal": "SIGBUS", "step": None, "detail": ""}, "rank 1 on gpu02: signal SIGBUS", None),
    ],
)  # fmt: skip
def test_failed_rank_is_an_interruption(
    attempt: AttemptMaker, fields: dict[str, Any], detail: str, signature: str | None
) -> None:
    failed = attempt()
    failed.beat(0, step=20)
    failed.fail(1, **fields)
    [one] = failed.events("interruption")
    assert (one["cause"], one["rank"], one["node"]) == (fields.get("cause", "crashed"), 1, "gpu02")
    assert (one["detail"], one["signature"]) == (detail, signature)
    assert (one["failed_at"], one["noticed_at"]) == (failed.clock.now - 1, failed.clock.now)
    assert one["step"] == (20 if fields.get("step", 7) is None else 7), "its own step, if that is known"
    assert not failed.is_over(), "torchrun restarts the ranks"
    assert failed.members == (0, 1, 2)


def test_steps_of_a_script_are_unknown_until_it_has_told_where_it_started(attempt: AttemptMaker) -> None:
    script = attempt(program=script_program(("a.py",)))
    script.beat(0, step=20)
    script.fail(1)
    assert [event["step"] for event in script.events("interruption")] == [None]
    write_events(script.node.run, train_started(script.clock.now, 0), file="attempt-001-trainer.jsonl")
    script.fail(1, detail="another", started_at=script.clock.now + 1)
    assert [event["step"] for event in script.events("interruption")] == [None, 7]


def test_node_at_fault_is_left_out(attempt: AttemptMaker) -> None:
    bad = attempt()
    bad.fail(2, cause="bad_node", detail="ECC error")
    assert bad.coordinator.bad_nodes == {2}
    assert bad.members == (0, 1)
    assert [event["cause"] for event in bad.events("interruption")] == ["bad_node"]
    bad.nodes.report(1, phase=Phase.BAD_NODE, detail="no GPU")
    bad.poll()
    assert bad.coordinator.bad_nodes == {1, 2}


def test_failure_waits_until_all_others_have_been_heard(attempt: AttemptMaker) -> None:
    """One that is about to be lost may be the reason."""
    unheard = attempt()
    unheard.nodes.silent[2] = 0.9
    unheard.fail(1)
    assert not unheard.events("interruption")
    unheard.nodes.silent[2] = 0.8
    unheard.poll()
    assert [event["cause"] for event in unheard.events("interruption")] == ["crashed"]


def test_failure_does_not_wait_for_lost_nodes_and_spares(attempt: AttemptMaker) -> None:
    unheard = attempt(resources=resources_of(nodes="1:2"))
    unheard.nodes.directive = replace(unheard.nodes.directive, members=(0, 1))
    unheard.nodes.silent |= {0: 3.0, 2: 3.0}
    unheard.fail(1)
    assert [event["cause"] for event in unheard.events("interruption")] == ["crashed"]


# --- budgets ---


def test_same_failure_twice_ends_the_attempt(attempt: AttemptMaker) -> None:
    twice = attempt()
    twice.fail(1)
    assert not twice.is_over()
    twice.fail(2, started_at=twice.clock.now + 3, detail="ValueError: 13 is too much")
    assert twice.is_over()
    assert len(twice.events("interruption")) == 1, "the last one is the cause of the end"
    failure = twice.coordinator.failure
    assert failure is not None
    assert (failure.cause, failure.rank, failure.step) == ("crashed", 2, 7)
    assert failure.detail == "rank 2 on gpu03: exit code 1: ValueError: 13 is too much"
    assert not twice.coordinator.done


def test_pause_ends_although_a_rank_had_failed_just_before_it(attempt: AttemptMaker) -> None:
    pausing = attempt()
    failed_at = pausing.clock.now
    failure = RankFailed(
        node="gpu02", round=1, rank=1, restarts=0, started_at=failed_at - 30, failed_at=failed_at, exit_code=1,
        signal=None, cause=Cause.CRASHED, step=7, detail="",
    )  # fmt: skip
    pausing.nodes.report(1, failures=(failure,))
    pausing.poll()
    # As if a hang of the other ranks had been noticed in the same second.
    pausing.nodes.directive = replace(pausing.nodes.directive, paused=True)
    for rank in range(3):
        pausing.nodes.report(rank, phase=Phase.READY)
    pausing.poll(30.0)
    assert not pausing.nodes.directive.paused
    assert pausing.nodes.directive.round == 2


def test_signal_ends_a_pause(attempt: AttemptMaker) -> None:
    pausing = attempt()
    pausing.nodes.directive = replace(pausing.nodes.directive, paused=True)
    for rank in range(3):
        pausing.nodes.report(rank, phase=Phase.READY)
    pausing.stop.handle(STOP_SIGNALS[1], None)
    pausing.poll()
    assert pausing.is_over()
    assert (pausing.coordinator.failure, pausing.coordinator.signal) == (None, "SIGTERM")


def test_attempt_that_others_have_ended_is_over(attempt: AttemptMaker) -> None:
    ended = attempt()
    write_events(ended.node.run, attempt_ended(cause="node_failure"), file="attempt-001-end.jsonl")
    ended.fail(1)
    assert ended.is_over()
    assert ended.coordinator.failure is None
    assert not ended.events("interruption")


# --- hangs and stragglers ---


def test_hung_ranks_are_aborted(attempt: AttemptMaker) -> None:
    hung = attempt()
    for rank in range(3):
        hung.beat(rank, still_seconds=61.0, phase="load" if rank == 1 else "step")
    hung.poll()
    assert hung.nodes.directive.abort_count == 1
    [one] = hung.events("interruption")
    assert (one["cause"], one["rank"], one["node"], one["signature"]) == ("hang", 1, None, "")
    assert (one["failed_at"], one["step"]) == (hung.clock.now - 61.0, 9)
    assert one["detail"] == "rank 1 has been in load after step 9 for 61 s, and the others wait for it"
    hung.poll(1.0)
    assert len(hung.events("interruption")) == 1, "they are being killed"
    hung.fail(1, signal="SIGABRT", started_at=hung.clock.now - 1)
    assert len(hung.events("interruption")) == 1, "that is how they were killed"
    for rank in range(3):
        hung.beat(rank, still_seconds=61.0, step=15)
    hung.poll(62.0)
    assert hung.nodes.directive.abort_count == 2
    assert [event["step"] for event in hung.events("interruption")] == [9, 15]


def test_hang_of_a_script_is_known_by_its_step(attempt: AttemptMaker) -> None:
    hung = attempt(program=script_program(("a.py",)))
    for rank in range(3):
        hung.beat(rank, still_seconds=61.0)
    hung.poll()
    assert [event["signature"] for event in hung.events("interruption")] == ["after step 9"]


@pytest.mark.parametrize(("states", "cause", "bad_nodes"), [("SSD", "bad_node", {2}), ("SDD", "hang", set[int]())])
def test_node_where_a_rank_cannot_be_killed_is_left_out(
    attempt: AttemptMaker, states: str, cause: str, bad_nodes: set[int]
) -> None:
    """Unless it is so on several nodes: then it is their storage."""
    stuck = attempt()
    for rank, state in enumerate(states):
        stuck.beat(rank, still_seconds=61.0, state=state)
    stuck.poll()
    [one] = stuck.events("interruption")
    assert (one["cause"], stuck.coordinator.bad_nodes, stuck.coordinator.stuck) == (cause, bad_nodes, bad_nodes)
    assert (one["node"], one["signature"]) == (("gpu03", None) if bad_nodes else (None, ""))
    assert stuck.members == ((0, 1) if bad_nodes else (0, 1, 2))


@pytest.mark.parametrize("why", ["stop", "silent", "lost"])
def test_ranks_that_are_stopped_or_wait_for_a_node_do_not_hang(attempt: AttemptMaker, why: str) -> None:
    waiting = attempt()
    for rank in range(3):
        waiting.beat(rank, still_seconds=61.0)
    if why == "stop":
        waiting.stop.handle(STOP_SIGNALS[0], None)
    else:
        waiting.nodes.silent[2] = 1.0 if why == "silent" else 6.0
    waiting.poll()
    assert waiting.nodes.directive.abort_count == 0
    assert [event["cause"] for event in waiting.events("interruption")] == ["node_failure"] * (why == "lost")


def test_heartbeats_of_an_earlier_round_and_of_lost_nodes_do_not_count(attempt: AttemptMaker) -> None:
    old = attempt()
    for rank in range(3):
        old.beat(rank, still_seconds=61.0, step=50)
    old.nodes.directive = replace(old.nodes.directive, round=2)
    old.poll()
    assert old.nodes.directive.abort_count == old.coordinator.last_step == 0
    for rank in range(3):
        old.nodes.report(rank, round=2)
        old.beat(rank, step=3 + rank)
    old.nodes.silent[2] = 6.0
    old.poll()
    assert [event["step"] for event in old.events("interruption")] == [0], "what the lost node did is lost"


def test_straggler_is_recorded(attempt: AttemptMaker, capsys: pytest.CaptureFixture[str]) -> None:
    slow = attempt()
    for rank in range(3):
        slow.beat(rank, busy_seconds=0.4 if rank == 2 else 0.1)
    slow.poll()
    slow.poll(11.0)
    expected = {"rank": 2, "node": "gpu03", "busy_seconds": 0.4, "median_seconds": 0.1}
    assert slow.events("slow_rank") == [expected]
    assert (
        "rank 2 on gpu03 slows the others down: it works 0.400 s per step, the others 0.100 s"
        in capsys.readouterr().out
    )


def test_ranks_that_do_nothing_are_recorded_and_left_alone(
    attempt: AttemptMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = attempt(recovery=Recovery())
    for still_seconds in (899.0, 901.0, 902.0, 0.0):
        for rank in range(3):
            silent.beat(rank, phase="unwatched", step=0, still_seconds=still_seconds)
        silent.poll()
    assert silent.events("ranks_silent") == [{"seconds": 901.0}, {"seconds": 0.0}]
    assert silent.events("interruption") == []
    said = "no rank has used the processor, or read or written anything, for 901 s"
    assert capsys.readouterr().out.count(said) == 1
