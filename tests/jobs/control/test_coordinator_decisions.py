"""What the coordinator decides, by what the nodes report: which events it records, and what it directs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from support.events import attempt_ended, cancelled, claimed, interruption, train_started, write_events
from support.reported_nodes import Clock, ReportedNodes

from hpc.core.ledger import Event
from hpc.spec import Recovery, Resources
from jobs.control.coordinator import Coordinator
from jobs.control.messages import Phase, RankFailure, RankHeartbeat
from jobs.node_attempt import NodeAttempt
from jobs.stop_request import STOP_SIGNALS, StopRequest
from training.config.train_config import TrainConfig

HOSTS = ("gpu01", "gpu02", "gpu03")


class Attempt:
    """An attempt on three nodes, which train since a while."""

    def __init__(self, node: NodeAttempt, clock: Clock, *events: Event, **spec: Any) -> None:
        usual = {
            "train": TrainConfig(data="x"),
            "resources": Resources(nodes="2:3"),
            "recovery": Recovery(hang_timeout="60s"),
        }
        self.clock, self.nodes, self.stop = clock, ReportedNodes(len(HOSTS)), StopRequest()
        write_events(node.run, claimed(clock.now - 900, nodes=HOSTS), *events, file="attempt-001-node-00.jsonl")
        self.node = replace(
            node,
            spec=replace(node.spec, **{**usual, **spec}),
            # Not on Slurm, which could say how long a silent node is waited for.
            allocation=replace(node.allocation, hostnames=HOSTS, cluster="local"),
        )
        self.coordinator = Coordinator(self.node, cast("Any", self.nodes), self.stop)

    def poll(self, seconds: float = 0.0) -> None:
        """Look at the statuses after some seconds."""
        self.clock.advance(seconds)
        self.coordinator.poll()

    def beat(self, node_rank: int, **fields: Any) -> RankHeartbeat:
        """Have the rank of a node, of the same number, report."""
        usual = {
            "step": 9,
            "phase": "step",
            "state": "S",
            "still_seconds": 0.1,
            "step_seconds": 0.1,
            "busy_seconds": 0.1,
        }
        heartbeat = RankHeartbeat(rank=node_rank, **{**usual, **fields})
        self.nodes.report(node_rank, heartbeats=(heartbeat,))
        return heartbeat

    def fail(self, node_rank: int, **fields: Any) -> None:
        """Have the rank of a node fail now, and this be known a second later."""
        now = self.clock.now
        usual = {
            "node": HOSTS[node_rank], "round": 1, "rank": node_rank, "started_at": now - 30, "failed_at": now,
            "exit_code": 1, "signal": None, "cause": "crashed", "step": 7, "detail": "ValueError: 12 is too much",
        }  # fmt: skip
        self.nodes.report(node_rank, failures=(RankFailure(**{**usual, **fields}),))
        self.poll()
        self.poll(1.0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind, without what every event has."""
        return [
            {name: value for name, value in event.items() if name not in {"time", "event", "attempt"}}
            for event in self.node.events(kind)
        ]

    @property
    def members(self) -> tuple[int, ...]:
        return self.nodes.directive.members

    def is_over(self) -> bool:
        return self.nodes.directive.over


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def attempt(node: NodeAttempt, clock: Clock) -> Callable[..., Attempt]:
    return lambda *events, **spec: Attempt(node, clock, *events, **spec)


# --- lost nodes ---


def test_lost_member_is_an_interruption_and_the_others_go_on(attempt: Callable[..., Attempt]) -> None:
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


def test_node_that_comes_back_takes_part_again(attempt: Callable[..., Attempt]) -> None:
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


def test_node_that_is_lost_later_fell_silent_a_short_time_ago(attempt: Callable[..., Attempt]) -> None:
    twice = attempt(resources=Resources(nodes="1:3"))
    twice.nodes.silent[1] = 6.0
    twice.poll()
    twice.nodes.silent |= {1: 36.0, 2: 5.5}
    twice.poll(30.0)
    assert [event["failed_at"] for event in twice.events("interruption")] == [twice.clock.now - 36, twice.clock.now - 5]
    assert [event["node"] for event in twice.events("interruption")] == ["gpu02", "gpu03"]


@pytest.mark.parametrize("phase", [Phase.LEFT, Phase.FAILED, Phase.BAD_NODE])
def test_node_that_has_left_is_not_lost(attempt: Callable[..., Attempt], phase: Phase) -> None:
    left = attempt()
    left.nodes.report(1, phase=phase)
    left.nodes.silent |= {0: 9.0, 1: 9.0}
    left.poll()
    assert not left.events("node_lost"), "nor is the head node, whose agent decides this"


def test_loss_of_a_spare_or_in_a_pause_interrupts_nothing(attempt: Callable[..., Attempt]) -> None:
    spare = attempt(resources=Resources(nodes="1:2"))
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


def test_silent_node_is_waited_for_if_the_run_needs_it(attempt: Callable[..., Attempt]) -> None:
    needed = attempt(resources=Resources(nodes="3"))
    on_slurm = replace(needed.node, allocation=replace(needed.node.allocation, cluster="slurm"))
    needed.coordinator = Coordinator(on_slurm, cast("Any", needed.nodes), needed.stop)
    needed.nodes.silent[1] = 6.0
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
        needed.coordinator.failure.detail == "lost contact with gpu02; 2 of the 3 nodes are left, and the run needs 3"
    )


def test_node_whose_agent_has_ended_is_not_waited_for(attempt: Callable[..., Attempt]) -> None:
    needed = attempt(resources=Resources(nodes="3"))
    on_slurm = replace(needed.node, allocation=replace(needed.node.allocation, cluster="slurm"))
    needed.coordinator = Coordinator(on_slurm, cast("Any", needed.nodes), needed.stop)
    needed.nodes.silent[1] = 6.0
    needed.nodes.ended.add(1)
    needed.poll()
    assert needed.is_over()


# --- failed ranks ---


@pytest.mark.parametrize(
    ("fields", "detail", "signature"),
    [
        ({}, "rank 1 on gpu02: exit code 1: ValueError: 12 is too much", "1: ValueError: # is too much"),
        ({"exit_code": -11, "signal": "SIGSEGV", "detail": ""}, "rank 1 on gpu02: signal SIGSEGV", "SIGSEGV: "),
        ({"exit_code": -9, "signal": "SIGKILL", "detail": "x"}, "rank 1 on gpu02: signal SIGKILL: x", None),
        ({"exit_code": 3, "detail": ""}, "rank 1 on gpu02: exit code 3", "3: "),
        ({"cause": "out_of_memory", "exit_code": -9, "signal": "SIGKILL", "detail": ""},
         "rank 1 on gpu02: signal SIGKILL", "SIGKILL: "),
        ({"signal": "SIGBUS", "step": None, "detail": ""}, "rank 1 on gpu02: signal SIGBUS", None),
    ],
)  # fmt: skip
def test_failed_rank_is_an_interruption(
    attempt: Callable[..., Attempt], fields: dict[str, Any], detail: str, signature: str | None
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


def test_steps_of_a_script_are_unknown_until_it_has_told_where_it_started(attempt: Callable[..., Attempt]) -> None:
    script = attempt(train=None)
    script.beat(0, step=20)
    script.fail(1)
    assert [event["step"] for event in script.events("interruption")] == [None]
    write_events(script.node.run, train_started(script.clock.now, 0), file="attempt-001-trainer.jsonl")
    script.fail(1, detail="another", started_at=script.clock.now + 1)
    assert [event["step"] for event in script.events("interruption")] == [None, 7]


def test_node_at_fault_is_left_out(attempt: Callable[..., Attempt]) -> None:
    bad = attempt()
    bad.fail(2, cause="bad_node", detail="ECC error")
    assert bad.coordinator.bad_nodes == {2}
    assert bad.members == (0, 1)
    assert [event["cause"] for event in bad.events("interruption")] == ["bad_node"]
    bad.nodes.report(1, phase=Phase.BAD_NODE, detail="no GPU")
    bad.poll()
    assert bad.coordinator.bad_nodes == {1, 2}


def test_failure_waits_until_all_others_have_been_heard(attempt: Callable[..., Attempt]) -> None:
    """One that is about to be lost may be the reason."""
    unheard = attempt()
    unheard.nodes.silent[2] = 0.9
    unheard.fail(1)
    assert not unheard.events("interruption")
    unheard.nodes.silent[2] = 0.8
    unheard.poll()
    assert [event["cause"] for event in unheard.events("interruption")] == ["crashed"]


def test_failure_does_not_wait_for_lost_nodes_and_spares(attempt: Callable[..., Attempt]) -> None:
    unheard = attempt(resources=Resources(nodes="1:2"))
    unheard.nodes.directive = replace(unheard.nodes.directive, members=(0, 1))
    unheard.nodes.silent |= {0: 3.0, 2: 3.0}
    unheard.fail(1)
    assert [event["cause"] for event in unheard.events("interruption")] == ["crashed"]


# --- budgets ---


def test_same_failure_twice_ends_the_attempt(attempt: Callable[..., Attempt]) -> None:
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


def test_failures_without_progress_pause(attempt: Callable[..., Attempt]) -> None:
    pausing = attempt(
        interruption(1_000_000.0 - 800, step=7, signature="a"), interruption(1_000_000.0 - 700, step=7, signature="b")
    )
    pausing.coordinator = Coordinator(pausing.node, cast("Any", pausing.nodes), pausing.stop)
    for number in range(4):
        pausing.fail(1, detail=f"failure {'x' * number}", started_at=pausing.clock.now + 3)
        if pausing.nodes.directive.paused:
            break
    pause = pausing.events("interruption")[-1]["pause_seconds"]
    assert pause > 0.0
    for rank in range(3):
        pausing.nodes.report(rank, phase=Phase.READY)
    pausing.poll(pause - 0.5)
    assert pausing.nodes.directive.paused
    pausing.poll(0.5)
    assert not pausing.nodes.directive.paused
    assert pausing.nodes.directive.round == 2


def test_attempt_that_others_have_ended_is_over(attempt: Callable[..., Attempt]) -> None:
    ended = attempt()
    write_events(ended.node.run, attempt_ended(cause="node_failure"), file="attempt-001-end.jsonl")
    ended.fail(1)
    assert ended.is_over()
    assert ended.coordinator.failure is None
    assert not ended.events("interruption")


@pytest.mark.parametrize("what", ["ended", "cancelled"])
def test_end_by_others_and_cancellation_are_seen_within_seconds(attempt: Callable[..., Attempt], what: str) -> None:
    ended = attempt()
    ended.poll()
    if what == "ended":
        write_events(ended.node.run, attempt_ended(cause="node_failure"), file="attempt-001-end.jsonl")
    else:
        write_events(ended.node.run, cancelled(), file=ended.node.run.cancellation.name)
    ended.poll(4.75)
    assert not ended.is_over(), "not every poll asks the shared storage"
    ended.poll(0.25)
    assert ended.is_over()
    ended.nodes.silent[1] = 6.0
    ended.poll()
    assert not ended.events("node_lost"), "it does nothing more"


# --- hangs and stragglers ---


def test_hung_ranks_are_aborted(attempt: Callable[..., Attempt]) -> None:
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


def test_hang_of_a_script_is_known_by_its_step(attempt: Callable[..., Attempt]) -> None:
    hung = attempt(train=None)
    for rank in range(3):
        hung.beat(rank, still_seconds=61.0)
    hung.poll()
    assert [event["signature"] for event in hung.events("interruption")] == ["after step 9"]


@pytest.mark.parametrize("why", ["stop", "silent", "lost"])
def test_ranks_that_are_stopped_or_wait_for_a_node_do_not_hang(attempt: Callable[..., Attempt], why: str) -> None:
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


def test_heartbeats_of_an_earlier_round_and_of_lost_nodes_do_not_count(attempt: Callable[..., Attempt]) -> None:
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


def test_straggler_is_recorded(attempt: Callable[..., Attempt], capsys: pytest.CaptureFixture[str]) -> None:
    slow = attempt()
    for rank in range(3):
        slow.beat(rank, busy_seconds=0.4 if rank == 2 else 0.1)
    slow.poll()
    slow.poll(11.0)
    expected = {"rank": 2, "node": "gpu03", "busy_seconds": 0.4, "median_seconds": 0.1}
    assert slow.events("slow_rank") == [expected]
    assert "rank 2 on gpu03 slows the others down: it works 0.400 s per step, they 0.100 s" in capsys.readouterr().out


# --- rounds ---


def ready(attempt: Attempt) -> None:
    """Have all nodes wait for the first round."""
    attempt.nodes.directive = replace(attempt.nodes.directive, round=0, members=(), host="", port=0)
    for rank in range(3):
        attempt.nodes.report(rank, phase=Phase.READY, round=0)


def test_first_round_begins_when_all_nodes_are_ready(attempt: Callable[..., Attempt]) -> None:
    starting = attempt()
    ready(starting)
    starting.nodes.report(1, phase=Phase.STARTING)
    starting.poll(59.0)
    assert starting.nodes.directive.round == 0
    starting.nodes.report(1, phase=Phase.READY)
    starting.poll()
    assert starting.events("rendezvous") == [{"round": 1, "port": 100, "members": [0, 1, 2]}]
    assert not starting.nodes.directive.preflight, "our trainer checks its nodes itself"


def test_nodes_that_are_ready_start_without_a_late_one_after_a_minute(attempt: Callable[..., Attempt]) -> None:
    starting = attempt()
    ready(starting)
    starting.nodes.forget(1)
    starting.poll(60.0)
    assert starting.members == ()
    starting.poll(0.25)
    assert starting.members == (0, 2)


def test_script_starts_after_a_round_that_checks_the_nodes(attempt: Callable[..., Attempt]) -> None:
    script = attempt(train=None)
    ready(script)
    script.poll()
    assert (script.nodes.directive.round, script.nodes.directive.preflight) == (1, True)
    for rank in range(3):
        script.nodes.report(rank, phase=Phase.ENDED, round=1)
    script.poll()
    assert script.events("checked") == [{"nodes": list(HOSTS)}]
    assert (script.nodes.directive.round, script.nodes.directive.preflight) == (2, False)
    assert script.members == (0, 1, 2)
    again = Coordinator(script.node, cast("Any", script.nodes), script.stop)
    ready(script)
    again.poll()
    assert not script.nodes.directive.preflight, "they were checked in this run before"


def test_attempt_is_done_when_all_members_are(attempt: Callable[..., Attempt]) -> None:
    done = attempt()
    for rank in range(3):
        assert not done.is_over()
        done.nodes.report(rank, phase=Phase.ENDED)
        done.poll()
    assert done.is_over()
    assert done.coordinator.done
    assert done.coordinator.failure is None


def test_torchrun_that_fails_again_and_again_ends_the_attempt(attempt: Callable[..., Attempt]) -> None:
    failing = attempt()
    for number in range(1, 7):
        assert failing.nodes.directive.round == number
        for rank in range(3):
            failing.nodes.report(rank, phase=Phase.ENDED, round=number, exit_code=int(rank == 1))
        failing.poll(119.0)
    assert failing.is_over()
    assert failing.coordinator.failure is not None
    assert failing.coordinator.failure.cause == "crashed"
    assert failing.coordinator.failure.detail == "torchrun failed 5 times in a row: hpc logs --all has why"


def test_failed_rounds_that_lasted_do_not_count(attempt: Callable[..., Attempt]) -> None:
    failing = attempt()
    for number in range(1, 9):
        for rank in range(3):
            failing.nodes.report(rank, phase=Phase.ENDED, round=number, exit_code=int(rank == 1))
        failing.poll(120.0)
    assert not failing.is_over()
    assert failing.nodes.directive.round == 9


def test_stop_waits_until_no_node_runs(attempt: Callable[..., Attempt]) -> None:
    stopped = attempt()
    stopped.stop.handle(STOP_SIGNALS[1], None)
    stopped.nodes.report(1, phase=Phase.ENDED)
    stopped.nodes.report(2, phase=Phase.LEFT)
    stopped.poll()
    assert not stopped.is_over()
    stopped.nodes.report(0, phase=Phase.ENDED)
    stopped.poll()
    assert stopped.is_over()
    assert (stopped.coordinator.done, stopped.coordinator.failure) == (False, None)
    assert stopped.coordinator.signal == "SIGTERM"


def test_stop_does_not_wait_for_lost_nodes(attempt: Callable[..., Attempt]) -> None:
    stopped = attempt()
    stopped.stop.handle(STOP_SIGNALS[1], None)
    for rank in (0, 1):
        stopped.nodes.report(rank, phase=Phase.ENDED)
    stopped.nodes.silent[2] = 6.0
    stopped.poll()
    assert stopped.is_over()


def test_signal_of_another_node_counts(attempt: Callable[..., Attempt]) -> None:
    other = attempt()
    assert other.coordinator.signal is None
    other.nodes.report(2, signal="SIGUSR2")
    assert other.coordinator.signal == "SIGUSR2"
    other.stop.handle(STOP_SIGNALS[1], None)
    assert other.coordinator.signal == "SIGTERM", "its own comes first"


# --- too few nodes ---


def test_too_few_nodes_end_the_attempt_with_what_failed_on_them(attempt: Callable[..., Attempt]) -> None:
    few = attempt(resources=Resources(nodes="3"))
    ready(few)
    few.nodes.report(1, phase=Phase.FAILED, detail="no space in /tmp")
    few.poll()
    failure = few.coordinator.failure
    assert failure is not None
    left = "2 of the 3 nodes are left, and the run needs 3"
    assert (failure.cause, failure.detail) == ("crashed", f"gpu02: no space in /tmp; {left}")
    assert (failure.node, failure.signature) == (
        None,
        "gpu#: no space in /tmp; # of the # nodes are left, and the run needs #",
    )
    assert (failure.failed_at, failure.noticed_at) == (few.clock.now, few.clock.now)


def test_bad_node_is_at_fault_for_too_few_nodes(attempt: Callable[..., Attempt]) -> None:
    few = attempt(resources=Resources(nodes="3"))
    ready(few)
    few.nodes.report(1, phase=Phase.FAILED, detail="no space in /tmp")
    few.nodes.report(2, phase=Phase.BAD_NODE, detail="no GPU answers")
    few.poll()
    failure = few.coordinator.failure
    assert failure is not None
    assert (failure.cause, failure.node, failure.signature) == ("bad_node", "gpu03", None)
    assert failure.detail.startswith("gpu02: no space in /tmp; gpu03: no GPU answers; 1 of the 3 nodes")


def test_lost_node_is_at_fault_for_too_few_nodes(attempt: Callable[..., Attempt]) -> None:
    few = attempt(resources=Resources(nodes="3"))
    ready(few)
    few.nodes.silent[2] = 6.0
    few.poll()
    failure = few.coordinator.failure
    assert failure is not None
    assert (failure.cause, failure.node, failure.signature) == ("node_failure", "gpu03", None)
    assert failure.detail == "lost contact with gpu03; 2 of the 3 nodes are left, and the run needs 3"
    assert not few.events("interruption"), "it did not train yet"


def test_last_failure_is_the_reason_for_too_few_nodes_if_it_is_recent(attempt: Callable[..., Attempt]) -> None:
    few = attempt(resources=Resources(nodes="3"))
    few.fail(1)
    few.nodes.report(2, phase=Phase.LEFT)
    few.poll(100.0)
    failure = few.coordinator.failure
    assert failure is not None
    assert (failure.rank, failure.step) == (1, 7)
    assert failure.detail == (
        "rank 1 on gpu02: exit code 1: ValueError: 12 is too much; 2 of the 3 nodes are left, and the run needs 3"
    )


@pytest.mark.parametrize("why", ["old", "another"])
def test_failure_that_is_old_or_of_another_node_is_not_the_reason(attempt: Callable[..., Attempt], why: str) -> None:
    few = attempt(resources=Resources(nodes="3"))
    few.fail(1)
    changes = {"phase": Phase.LEFT} if why == "old" else {"phase": Phase.FAILED, "detail": "gone"}
    few.nodes.report(2, **changes)
    few.poll(105.0 if why == "old" else 1.0)
    failure = few.coordinator.failure
    assert failure is not None
    assert (failure.cause, failure.rank) == ("crashed", None)
    assert failure.detail.startswith("2 of the 3" if why == "old" else "gpu03: gone; 2 of the 3")


def test_node_that_never_reported_is_waited_for(attempt: Callable[..., Attempt]) -> None:
    few = attempt(resources=Resources(nodes="3"))
    ready(few)
    few.nodes.forget(2)
    few.poll(599.0)
    assert not few.is_over()
    few.poll(1.0)
    assert few.is_over()
