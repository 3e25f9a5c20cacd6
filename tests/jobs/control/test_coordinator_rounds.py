"""Which rounds the coordinator announces, and when the attempt is over."""

from dataclasses import replace
from typing import Any, cast

import pytest
from support.events import resources_of
from support.reported_nodes import HOSTS, AttemptMaker, CoordinatedAttempt

from hpc.run.causes import Cause
from hpc.run.events.kinds import Interrupted
from hpc.run.spec import Recovery
from hpc.run.spec_file import script_program
from jobs.control.coordinator import Coordinator
from jobs.control.messages import Phase
from jobs.stop_request import STOP_SIGNALS

# --- rounds ---


def ready(attempt: CoordinatedAttempt) -> None:
    """Have all nodes wait for the first round."""
    attempt.nodes.directive = replace(attempt.nodes.directive, round=0, members=(), host="", port=0)
    for rank in range(3):
        attempt.nodes.report(rank, phase=Phase.READY, round=0)


def test_first_round_begins_when_all_nodes_are_ready(attempt: AttemptMaker) -> None:
    starting = attempt()
    ready(starting)
    starting.nodes.report(1, phase=Phase.STARTING)
    starting.poll(59.0)
    assert starting.nodes.directive.round == 0
    starting.nodes.report(1, phase=Phase.READY)
    starting.poll()
    assert starting.events("rendezvous") == [{"round": 1, "port": 100, "members": [0, 1, 2]}]
    assert not starting.nodes.directive.preflight, "our trainer checks its nodes itself"


def test_script_starts_after_a_round_that_checks_the_nodes(attempt: AttemptMaker) -> None:
    script = attempt(program=script_program(("a.py",)))
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


def test_spare_takes_part_in_the_preflight_and_then_replaces_a_lost_node_at_once(attempt: AttemptMaker) -> None:
    script = attempt(program=script_program(("a.py",)), resources=resources_of(nodes="2"), recovery=Recovery(spares=1))
    ready(script)
    script.nodes.report(2, phase=Phase.STARTING)
    script.poll()
    script.nodes.report(2, phase=Phase.READY, round=0)
    script.poll(1.0)
    assert (script.members, script.nodes.directive.preflight) == ((0, 1, 2), True)
    for rank in range(3):
        script.nodes.report(rank, phase=Phase.ENDED, round=1)
    script.poll()
    assert (script.members, script.nodes.directive.preflight) == ((0, 1), False)
    for rank, phase in enumerate((Phase.RUNNING, Phase.RUNNING, Phase.ENDED)):
        script.nodes.report(rank, phase=phase, round=2 if phase is Phase.RUNNING else 1)
    script.nodes.silent[1] = 30.0
    script.poll()
    assert (script.members, script.nodes.directive.preflight) == ((0, 2), False)


@pytest.mark.parametrize("what", ["lost", "bad", "torchrun", "hangs", "crash"])
def test_spare_that_fails_the_preflight_costs_the_run_nothing(attempt: AttemptMaker, what: str) -> None:
    script = attempt(program=script_program(("a.py",)), resources=resources_of(nodes="2"), recovery=Recovery(spares=1))
    ready(script)
    script.poll()
    assert script.members == (0, 1, 2)
    for rank in range(3):
        script.nodes.report(rank, phase=Phase.RUNNING, round=1)
    script.clock.advance(5.0)
    now = script.clock.now
    if what == "lost":
        script.nodes.silent[2] = 30.0
    elif what == "bad":
        script.nodes.report(2, phase=Phase.BAD_NODE)
    elif what == "torchrun":
        script.nodes.report(2, phase=Phase.ENDED, round=1, exit_code=1)
    elif what == "hangs":
        script.clock.advance(200.0)
    # With the spare, the ranks of the other nodes fail.
    script.fail(2 if what == "crash" else 0, started_at=now - 1.0)
    assert (script.nodes.directive.round, script.members, script.nodes.directive.preflight) == (2, (0, 1), True)
    assert script.events("interruption") == []
    script.clock.advance(5.0)
    script.fail(0, round=2, started_at=script.clock.now - 1.0)
    assert len(script.events("interruption")) == 1, "this failure has nothing to do with the spare"


def test_script_does_not_wait_long_for_a_spare(attempt: AttemptMaker) -> None:
    script = attempt(program=script_program(("a.py",)), resources=resources_of(nodes="2"), recovery=Recovery(spares=1))
    ready(script)
    script.nodes.report(2, phase=Phase.STARTING)
    script.poll()
    assert script.members == ()
    script.poll(3.0)
    assert (script.members, script.nodes.directive.preflight) == ((0, 1), True)


@pytest.mark.parametrize(
    ("seconds", "failure"),
    [(119.0, "torchrun failed 5 times in a row: see hpc logs --all"), (120.0, None)],
    ids=["soon", "after rounds that lasted"],
)
def test_torchrun_that_fails_again_and_again_ends_the_attempt(
    attempt: AttemptMaker, seconds: float, failure: str | None
) -> None:
    failing = attempt()
    for number in range(1, 7):
        assert failing.nodes.directive.round == number
        for rank in range(3):
            failing.nodes.report(rank, phase=Phase.ENDED, round=number, exit_code=int(rank == 1))
        failing.poll(seconds)
    found = failing.coordinator.failure
    assert (failing.is_over(), found and found.detail) == (failure is not None, failure)
    assert found is None or found.cause == "crashed"


def test_stop_waits_until_no_node_runs(attempt: AttemptMaker) -> None:
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


def test_stop_does_not_wait_for_lost_nodes(attempt: AttemptMaker) -> None:
    stopped = attempt()
    stopped.stop.handle(STOP_SIGNALS[1], None)
    for rank in (0, 1):
        stopped.nodes.report(rank, phase=Phase.ENDED)
    stopped.nodes.silent[2] = 6.0
    stopped.poll()
    assert stopped.is_over()


def test_signal_of_another_node_counts(attempt: AttemptMaker) -> None:
    other = attempt()
    assert other.coordinator.signal is None
    other.nodes.report(2, signal="SIGUSR2")
    assert other.coordinator.signal == "SIGUSR2"
    other.stop.handle(STOP_SIGNALS[1], None)
    assert other.coordinator.signal == "SIGTERM", "its own comes first"


# --- too few nodes ---


def ended_by(few: CoordinatedAttempt, seconds: float = 0.0) -> Interrupted:
    """The failure that has ended the attempt some seconds later."""
    few.poll(seconds)
    assert few.coordinator.failure is not None
    return few.coordinator.failure


def test_too_few_nodes_end_the_attempt_with_what_failed_on_them(attempt: AttemptMaker) -> None:
    few = attempt(resources=resources_of(nodes="3"))
    ready(few)
    few.nodes.report(1, phase=Phase.FAILED, detail="no space in /tmp")
    failure = ended_by(few)
    left = "only 2 of 3 nodes can train, and the run needs 3"
    assert (failure.cause, failure.detail) == ("crashed", f"gpu02: no space in /tmp; {left}")
    assert (failure.node, failure.signature) == (
        None,
        "gpu#: no space in /tmp; only # of # nodes can train, and the run needs #",
    )
    assert (failure.failed_at, failure.noticed_at) == (few.clock.now, few.clock.now)


def test_node_whose_input_is_bad_ends_the_run(attempt: AttemptMaker) -> None:
    few = attempt(resources=resources_of(nodes="3"))
    ready(few)
    few.nodes.report(1, phase=Phase.FAILED, cause=Cause.BAD_INPUT, detail="pipe is not a regular file")
    failure = ended_by(few)
    assert (failure.cause, failure.node) == ("bad_input", None)


def test_bad_node_is_at_fault_for_too_few_nodes(attempt: AttemptMaker) -> None:
    few = attempt(resources=resources_of(nodes="3"))
    ready(few)
    few.nodes.report(1, phase=Phase.FAILED, detail="no space in /tmp")
    few.nodes.report(2, phase=Phase.BAD_NODE, detail="no GPU answers")
    failure = ended_by(few)
    assert (failure.cause, failure.node, failure.signature) == ("bad_node", "gpu03", None)
    assert failure.detail.startswith("gpu02: no space in /tmp; gpu03: no GPU answers; only 1 of 3 nodes")


def test_last_failure_is_the_reason_for_too_few_nodes_if_it_is_recent(attempt: AttemptMaker) -> None:
    few = attempt(resources=resources_of(nodes="3"))
    few.fail(1)
    few.nodes.report(2, phase=Phase.LEFT)
    failure = ended_by(few, 100.0)
    assert (failure.rank, failure.step) == (1, 7)
    assert failure.detail == (
        "rank 1 on gpu02: exit code 1: ValueError: 12 is too much; only 2 of 3 nodes can train, and the run needs 3"
    )
