"""Plays failures on trainings of several contenders at once, and finds what became of each."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import say
from benchmarks.recovery import failures, step_log
from benchmarks.recovery.contenders import Contender, Training, Workload

WORKER_KILLED = "worker killed"
# Until a training that was submitted is in the middle of its second epoch, on a busy machine.
_PATIENCE_SECONDS = 400.0
# A job that has ended, and that nothing has requeued in this time, stays so.
_ENDED_SECONDS = 20.0
# Who restarts in place has done so after this time; others wait for Slurm, and need no quiet machine.
_TURN_SECONDS = 60.0
_POLLS, _POLL_SECONDS = 10, 0.2


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
    plan: tuple[tuple[str, int], ...]
    """Kinds, and how often each."""
    supervised: bool = False
    stage: int = 0
    """The lanes of a stage begin when those of the one before are done, or have had their turns."""

    @property
    def title(self) -> str:
        """The name of the row."""
        return self.contender.title + (", supervised" if self.supervised else "")


class Turns:
    """Opens when as many lanes as were announced have passed."""

    def __init__(self, lanes: int) -> None:
        self._left, self._changed = lanes, threading.Condition()

    def passed(self) -> None:
        """Say that a lane needs no more turns."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._left <= 0)


class Watch:
    """Looks at a training after a failure, until it has made a step or its job has ended."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._ended_at: float | None = None
        self.recovery: step_log.Recovery | None = None

    def wait(self, failed_at: float, *, patience: float) -> None:
        """Return when one of the two is known, or the patience is over."""
        while not self.recovery and not self._has_ended() and time.time() < failed_at + patience:
            for _ in range(_POLLS):
                self.recovery = step_log.recovery(self._training.log(), failed_at)
                if self.recovery:
                    break
                time.sleep(_POLL_SECONDS)

    def _has_ended(self) -> bool:
        if self._training.jobs():
            self._ended_at = None
            return False
        self._ended_at = self._ended_at or time.monotonic()
        return time.monotonic() - self._ended_at > _ENDED_SECONDS


class Comparison:
    """Plays lanes, and collects the outcomes."""

    def __init__(self, workload: Workload, directory: Path, caps: Mapping[str, float]) -> None:
        self.workload, self.directory, self.caps = workload, directory, caps
        self.outcomes: list[Outcome] = []
        self._turn = threading.Lock()

    def play(self, lanes: Sequence[Lane]) -> None:
        """Play all lanes, stage by stage. The others go on if one fails; its error is raised at the end."""
        with ThreadPoolExecutor(max_workers=len(lanes)) as executor:
            futures = []
            for stage in sorted({lane.stage for lane in lanes}):
                now = [(number, lane) for number, lane in enumerate(lanes) if lane.stage == stage]
                turns = Turns(len(now))
                for number, lane in now:
                    futures.append(executor.submit(self._play, lane, number, turns))
                    # So that imports of different trainings do not coincide.
                    time.sleep(4)
                turns.wait()
        for future in futures:
            future.result()

    def _play(self, lane: Lane, number: int, turns: Turns) -> None:
        parent = self.directory / ("supervised" if lane.supervised else "runs")
        training: Training | None = None
        # Failures of our own trainer come alone: it computes without a wait.
        has_turns, started = True, 0
        try:
            for kind in (kind for kind, repeats in lane.plan for _ in range(repeats)):
                if has_turns and kind != WORKER_KILLED and lane.stage > 0:
                    turns.passed()
                    has_turns = False
                # What has not come back from a kind of failure does not meet it again.
                if any(each.recovery is None for each in self._outcomes(lane, kind)):
                    continue
                if training is None:
                    started += 1
                    training = lane.contender.start(parent / f"{lane.contender.key}-{number}-{started}", self.workload)
                outcome = self._fail(lane, kind, training)
                self.outcomes.append(outcome)
                if outcome.recovery is None:
                    training.cancel()
                    training = None
            if training is not None:
                training.cancel()
        finally:
            if has_turns:
                turns.passed()

    def _outcomes(self, lane: Lane, kind: str) -> list[Outcome]:
        return [each for each in self.outcomes if (each.title, each.kind) == (lane.title, kind)]

    def _fail(self, lane: Lane, kind: str, training: Training) -> Outcome:
        """Cause one failure, and return what comes of it."""
        watch = Watch(training)
        failure: failures.Failure | None = None
        while failure is None:
            self._wait_until_due(training)
            with self._turn if kind == WORKER_KILLED else nullcontext():
                # Another training may have had its turn meanwhile.
                if training.is_due():
                    failure = failures.KINDS[kind](training)
                    if kind == WORKER_KILLED:
                        watch.wait(failure.at, patience=min(_TURN_SECONDS, self.caps[kind]))
        watch.wait(failure.at, patience=self.caps[kind])
        recovery, lost = watch.recovery, 0.0
        if recovery:
            # The run's status needs a moment.
            time.sleep(5)
            recovery = replace(recovery, steps_lost=training.steps_lost(recovery))
            lost = recovery.steps_lost * step_log.step_seconds(training.log(), failure.at)
        if failure.killed_node:
            failures.revive(failure.killed_node)
        say(f"{lane.title}: {kind}: {recovery or 'not back'}")
        return Outcome(title=lane.title, kind=kind, recovery=recovery, work_lost=round(lost, 1))

    def _wait_until_due(self, training: Training) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not training.is_due():
            if time.monotonic() > deadline:
                raise SystemExit(f"{training.name} has not trained within {_PATIENCE_SECONDS:.0f} s: {training.jobs()}")
            time.sleep(0.5)
