"""Plays failures on trainings of several contenders at once, and finds what became of each."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import say
from benchmarks.recovery import failures
from benchmarks.recovery.contenders import Contender, Training, Workload
from benchmarks.recovery.rivals import step_log
from hpc.cluster.testbed.lifecycle import revive_node
from hpc.cluster.testbed.system import wait_until

# Until a training that was submitted is in the middle of its second epoch, on a busy machine.
_PATIENCE_SECONDS = 400.0
# A job that has ended, and that nothing has requeued in so many looks, stays so.
_MOST_LOOKS_WITHOUT_JOB = 10
_POLLS_PER_LOOK, _POLL_SECONDS = 10, 0.2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a contender after one failure."""

    title: str
    kind: str
    recovery: step_log.Recovery | None
    """None: it did not come back."""
    work_lost: float
    """Seconds in which the lost steps were made, and which it takes to make them again."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Failures that the trainings of a contender go through, one after another."""

    contender: Contender
    plan: Mapping[str, int]
    """How often each kind of failure happens."""
    in_turns: bool = False
    """No other training recovers while this one does."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all lanes have in common."""

    workload: Workload
    directory: Path
    caps: Mapping[str, float]
    """Seconds after which a training that has not come back from a kind of failure counts as lost."""


def play(lanes: Sequence[Lane], setting: Setting) -> list[Outcome]:
    """Play lanes at once, and return what became of each contender."""
    if not lanes:
        return []
    turn = threading.Lock()
    with ThreadPoolExecutor(max_workers=len(lanes)) as executor:
        futures = []
        for lane in lanes:
            futures.append(executor.submit(_play, lane, setting, turn))
            # So that imports of different trainings do not coincide.
            time.sleep(4)
    return [outcome for future in futures for outcome in future.result()]


def _play(lane: Lane, setting: Setting, turn: threading.Lock) -> list[Outcome]:
    found: list[Outcome] = []
    training: Training | None = None
    for kind, repeats in lane.plan.items():
        for number in range(repeats):
            if training is None:
                name = f"{lane.contender.key}-{kind}-{number}".replace(" ", "-")
                training = lane.contender.start(setting.directory / name, setting.workload)
            with turn if lane.in_turns else nullcontext():
                found.append(_fail(lane, kind, training, setting.caps[kind]))
            if found[-1].recovery is None:
                training.cancel()
                training = None
                # What has not come back from a kind of failure does not meet it again.
                break
    if training is not None:
        training.cancel()
    return found


def _fail(lane: Lane, kind: str, training: Training, cap: float) -> Outcome:
    """Cause one failure, and return what comes of it."""
    wait_until(training.is_due, seconds=_PATIENCE_SECONDS, what=f"{training.name} to train")
    training.note_failure()
    failure = failures.KINDS[kind](training)
    recovery = _wait_for_recovery(training, failure.at, cap)
    lost = recovery.steps_lost * step_log.step_seconds(training.log(), failure.at) if recovery else 0.0
    if failure.killed_node:
        revive_node(failure.killed_node)
    say(f"{lane.contender.title}: {kind}: {recovery or 'not back'}")
    return Outcome(title=lane.contender.title, kind=kind, recovery=recovery, work_lost=round(lost, 1))


def _wait_for_recovery(training: Training, failed_at: float, cap: float) -> step_log.Recovery | None:
    """Wait until a training trains again; None: its job has ended, or the time is over."""
    looks_without_job = 0
    while looks_without_job < _MOST_LOOKS_WITHOUT_JOB and time.time() < failed_at + cap:
        for _ in range(_POLLS_PER_LOOK):
            if found := step_log.recovery(training.log(), failed_at):
                return found
            time.sleep(_POLL_SECONDS)
        looks_without_job = 0 if training.jobs() else looks_without_job + 1
    return None
