"""Plays failures on trainings of several contenders at once, and finds what became of each. Used by `recovery.py`."""

import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.recovery import failures, step_log, testbed_nodes
from benchmarks.recovery.contenders import Contender, Job, Training, Workload, squeue

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
    work_lost: float
    """Seconds in which the lost steps were made, and which it takes to make them again."""
    ended: str | None
    """What became of it, if it did not come back."""
    job: str
    """How Slurm saw it: the same job, requeued, or another job."""
    held: float
    """GPU-seconds for which Slurm had nodes allocated to it, from the failure to the end of the wait."""
    left: str


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
        """Of the contender."""
        return self.contender.title + (", supervised" if self.supervised else "")


class Turns:
    """Opens when as many lanes as were announced have passed."""

    def __init__(self, lanes: int) -> None:
        self._left, self._changed = lanes, threading.Condition()

    def passed(self) -> None:
        """A lane needs no more turns."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._left <= 0)


class Watch:
    """Looks at a training after a failure, until it has made a step or its job has ended."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._ended_at: float | None = None
        self.recovery: step_log.Recovery | None = None
        self.ended: str | None = None
        self.held = 0.0
        """GPU-seconds that its jobs have had."""

    def wait(self, failed_at: float, *, patience: float) -> None:
        """Return when one of the two is known, or the patience is over."""
        while time.time() < failed_at + patience:
            began, jobs = time.monotonic(), self._training.jobs()
            holding = sum(len(job.nodes) for job in jobs if job.state in {"RUNNING", "COMPLETING"})
            for _ in range(_POLLS):
                self.recovery = step_log.recovery(self._training.log(), failed_at)
                if self.recovery:
                    break
                time.sleep(_POLL_SECONDS)
            self.held += holding * (time.monotonic() - began)
            if self.recovery or self._has_ended(jobs):
                return

    def _has_ended(self, jobs: Sequence[Job]) -> bool:
        if jobs:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = time.monotonic()
        elif time.monotonic() - self._ended_at > _ENDED_SECONDS:
            states = sorted({job.state for job in squeue(f"--jobs={self._training.job_id}")})
            self.ended = f"job ended: {', '.join(states) or 'forgotten by Slurm'}"
        return self.ended is not None


class Comparison:
    """Plays lanes, and collects the outcomes."""

    def __init__(self, workload: Workload, directory: Path, caps: Mapping[str, float]) -> None:
        self.workload, self.directory, self.caps = workload, directory, caps
        self.outcomes: list[Outcome] = []
        self.left_at_the_end: dict[str, str] = {}
        self._turn = threading.Lock()
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Progress."""
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", file=sys.stderr, flush=True)

    def play(self, lanes: Sequence[Lane]) -> None:
        """All lanes, stage by stage. The others go on if one fails; its error is raised at the end."""
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
        training: Training | None = None
        # Failures of our own trainer come alone: it computes without a wait.
        has_turns, started = True, 0
        try:
            for kind, repeats in lane.plan:
                if has_turns and kind != WORKER_KILLED and lane.stage > 0:
                    turns.passed()
                    has_turns = False
                for _ in range(repeats):
                    if training is None:
                        started += 1
                        parent = self.directory / ("supervised" if lane.supervised else "runs")
                        training = lane.contender.start(
                            parent / f"{lane.contender.key}-{number}-{started}", self.workload
                        )
                    outcome = self._fail(lane, kind, training)
                    self.outcomes.append(outcome)
                    if outcome.recovery is None:
                        self._end(lane, training)
                        training = None
                        break
            if training is not None:
                self._end(lane, training)
        finally:
            if has_turns:
                turns.passed()

    def _fail(self, lane: Lane, kind: str, training: Training) -> Outcome:
        """One failure, and what comes of it."""
        ids, watch = set[str](), Watch(training)
        failure: failures.Failure | None = None
        while failure is None:
            self._wait_until_due(training)
            with self._turn if kind == WORKER_KILLED else nullcontext():
                # Another training may have had its turn meanwhile.
                if training.is_due():
                    ids = {job.id for job in training.jobs()}
                    failure = failures.KINDS[kind](training)
                    if kind == WORKER_KILLED:
                        watch.wait(failure.at, patience=min(_TURN_SECONDS, self.caps[kind]))
        if watch.recovery is None and watch.ended is None:
            watch.wait(failure.at, patience=self.caps[kind])
        # What is left at once after the recovery may still be about to end.
        time.sleep(5)
        recovery = watch.recovery and replace(watch.recovery, steps_lost=training.steps_lost(watch.recovery))
        ended = watch.ended if recovery or watch.ended else f"not within {self.caps[kind]:.0f} s"
        lost = recovery.steps_lost * step_log.step_seconds(training.log(), failure.at) if recovery else 0.0
        outcome = Outcome(
            title=lane.title, kind=kind, recovery=recovery, work_lost=round(lost, 1), ended=ended,
            held=round(watch.held), job=_fate(training, ids, failure), left=_left_behind(training, failure),
        )  # fmt: skip
        if failure.killed_node:
            failures.revive(failure.killed_node)
        self.say(f"{lane.title}: {kind}: {recovery or ended}, {outcome.job}, left behind: {outcome.left}")
        return outcome

    def _wait_until_due(self, training: Training) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not training.is_due():
            if time.monotonic() > deadline:
                raise SystemExit(f"{training.name} has not trained within {_PATIENCE_SECONDS:.0f} s: {training.jobs()}")
            time.sleep(0.5)

    def _end(self, lane: Lane, training: Training) -> None:
        """Cancel it, and look at what remains on its nodes."""
        names = {name for job in training.jobs() for name in job.nodes}
        names |= {entry["host"] for entry in training.log() if "host" in entry}
        training.cancel()
        deadline = time.monotonic() + 60
        while training.jobs() and time.monotonic() < deadline:
            time.sleep(1)
        names -= {name for job in squeue() if job.state in {"RUNNING", "COMPLETING"} for name in job.nodes}
        left = (
            [f"{len(found)} processes"]
            if (found := [pid for name in names for pid in testbed_nodes.processes(name)])
            else []
        )
        left += [text] if (text := testbed_nodes.files(names)) else []
        self.left_at_the_end[f"{lane.title} ({training.name})"] = ", ".join(left) or "nothing"


def _fate(training: Training, before: set[str], failure: failures.Failure) -> str:
    """What became of the job."""
    jobs = [job for job in training.jobs() if job.state in {"RUNNING", "PENDING"}]
    if not jobs:
        return "no job"
    if {job.id for job in jobs} - before:
        return "new job"
    command = ["scontrol", "--oneliner", "show", "job", jobs[0].id]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    started = done.stdout.partition(" StartTime=")[2].partition(" ")[0]
    is_later = started == "Unknown" or time.mktime(time.strptime(started, "%Y-%m-%dT%H:%M:%S")) > failure.at
    return "requeued" if is_later else "same job"


def _left_behind(training: Training, failure: failures.Failure) -> str:
    """What the training no longer uses, and still has: processes, files, nodes."""
    jobs = training.jobs()
    busy = {name for job in squeue() if job.state == "RUNNING" for name in job.nodes}
    starts = [entry for entry in training.log() if entry["event"] == "start" and "host" in entry]
    current = {entry["pid"] for entry in step_log.ranks(starts).values()}
    stale = {entry["pid"] for entry in starts if entry["pid"] not in current and testbed_nodes.is_alive(entry["pid"])}
    # Of nodes that another training has got meanwhile nothing can be said.
    abandoned = [name for name in failure.job_nodes if name not in busy and name != failure.killed_node]
    stale |= {pid for name in abandoned for pid in testbed_nodes.processes(name)}
    found = [f"{len(stale)} process{'es' if len(stale) > 1 else ''}"] if stale else []
    found += [text] if (text := testbed_nodes.files(abandoned)) else []
    ending = {name for job in jobs if job.state == "COMPLETING" for name in job.nodes} - {failure.killed_node}
    found += [f"GPUs of {len(ending)} node{'s' if len(ending) > 1 else ''} held by an ending job"] if ending else []
    return ", ".join(found) or "nothing"
