"""Recovery against rivals: the same training, the same failures, on the testbed's Slurm.

    .venv/bin/python benchmarks/recovery.py --rivals rivals/bin/python

Each contender (`contenders.py`) trains on 2 nodes with a rank each. Each failure comes in the middle of an epoch, after
at least one whole epoch; a rival that saves once an epoch then loses half of one, as it does on average. Measured in the
steps that rank 0 logs (`step_log.py`): the seconds from the failure to the first step of ranks that were started
afterwards, and the steps that the restored state does not have.

Several contenders train at once, each on nodes of its own, so that the minutes for which Slurm lets the rivals wait
overlap. A step is mostly a wait (`rivals/common.py`), so the two cores are nearly idle but for starts. Where workers
restart in place, and only the start counts, one contender fails at a time. Rivals get no help of our supervisor; ours
has it only in the rows that say so. Slurm's settings are its defaults: SlurmdTimeout 300 s, 120 s until a requeued job may
start. The partition has a GraceTime of 20 s.
"""

import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import failures
import record
import step_log
import tyro
from contenders import CONTENDERS, NODES, ROOT, Contender, Training, Workload, squeue

SLURMD_TIMEOUT = 300
# Until a training that was submitted is in the middle of its second epoch, on a busy machine.
_PATIENCE_SECONDS = 400.0
# A job that has ended, and that nothing has requeued in this time, stays so.
_ENDED_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the recoveries of ours and of the rivals."""

    rivals: Path = ROOT / "rivals" / "bin" / "python"
    """The rivals' Python."""
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    """Which ones."""
    kinds: tuple[str, ...] = tuple(failures.KINDS)
    """Which failures."""
    repeats: int = 3
    """Of each failure of ours, and of those of the rivals that Slurm's detection of dead nodes has no part in."""
    cap: float = 540.0
    """Seconds after which a training that has not come back counts as lost."""
    wait: float = 0.2
    """Seconds of each step beside the network."""
    images: int = 20_000
    """Of an epoch."""
    small: bool = False
    """Only ours and submitit, killed workers and preemption, once, with short epochs; nothing is recorded."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a contender after one failure."""

    title: str
    kind: str
    recovery: step_log.Recovery | None
    ended: str | None
    """The state in which its job ended, if it did not come back."""
    waited: float
    jobs: str
    """How Slurm saw it: the same job, requeued, or another job."""
    left: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Failures that one training of a contender goes through, one after another."""

    contender: Contender
    plan: tuple[tuple[str, int], ...]
    """Kinds, and how often each."""
    supervised: bool = False
    after_turns: bool = False
    """It starts when the failures that have turns are over."""

    @property
    def title(self) -> str:
        """Of the contender."""
        return self.contender.title + (", supervised" if self.supervised else "")


class Comparison:
    """Plays the lanes at once, and collects the outcomes."""

    def __init__(self, options: Options, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.workload = Workload(rivals=options.rivals, images=options.images, wait=options.wait)
        self.outcomes: list[Outcome] = []
        self.left_at_the_end: dict[str, str] = {}
        self._turn = threading.Lock()
        self._with_turns = threading.Semaphore(0)
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Progress."""
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", file=sys.stderr, flush=True)

    def play(self, lanes: Sequence[Lane]) -> None:
        """All lanes; raises SystemExit at the end if one of them could not be played."""
        first = [lane for lane in lanes if not lane.after_turns]
        turns_left = threading.Barrier(len(first) + 1)
        problems: list[str] = []

        def guarded(lane: Lane, number: int) -> None:
            try:
                self._play(lane, number, turns_left)
            except (Exception, SystemExit):
                problems.append(f"{lane.title}:\n{traceback.format_exc()}")
                turns_left.abort()
                self.say(problems[-1])

        threads = {
            lane: threading.Thread(target=guarded, args=(lane, number), daemon=True) for number, lane in enumerate(lanes)
        }
        for lane in first:
            threads[lane].start()
            time.sleep(2)
        try:
            turns_left.wait()
        except threading.BrokenBarrierError:
            pass
        for lane in lanes:
            if lane.after_turns:
                threads[lane].start()
                time.sleep(8)
        for thread in threads.values():
            thread.join()
        if problems:
            raise SystemExit("\n".join(problems))

    def _play(self, lane: Lane, number: int, turns_left: threading.Barrier) -> None:
        training: Training | None = None
        started, has_turns = 0, not lane.after_turns
        for kind, repeats in lane.plan:
            if has_turns and kind != "worker killed":
                has_turns = self._leave(turns_left)
            for _ in range(repeats):
                if training is None:
                    started += 1
                    training = self._start(lane, f"{lane.contender.key}-{number}-{started}")
                outcome = self._fail(lane, kind, training)
                self.outcomes.append(outcome)
                if outcome.recovery is None:
                    self._end(lane, training)
                    training = None
                    break
        if has_turns:
            self._leave(turns_left)
        if training is not None:
            self._end(lane, training)

    @staticmethod
    def _leave(turns_left: threading.Barrier) -> bool:
        try:
            turns_left.wait()
        except threading.BrokenBarrierError:
            pass
        return False

    def _start(self, lane: Lane, name: str) -> Training:
        parent = self.directory / ("supervised" if lane.supervised else "runs")
        return lane.contender.start(parent / name, self.workload)

    def _fail(self, lane: Lane, kind: str, training: Training) -> Outcome:
        """One failure, in the middle of an epoch, and what comes of it."""
        self._wait_for_mid_epoch(training)
        ids = {job.id for job in training.jobs()}
        if kind == "worker killed":
            with self._turn:
                failure = failures.KINDS[kind](training)
                recovery, ended = self._wait(training, failure, patience=45)
            if recovery is None and ended is None:
                recovery, ended = self._wait(training, failure, patience=self.options.cap)
        else:
            failure = failures.KINDS[kind](training)
            recovery, ended = self._wait(training, failure, patience=self.options.cap)
        waited = round(time.time() - failure.at, 1)
        time.sleep(5)
        jobs = _fate(training, ids, failure)
        left = failures.left_behind(training, failure)
        if failure.killed_node:
            failures.revive(failure.killed_node)
        outcome = Outcome(
            title=lane.title, kind=kind, recovery=recovery, ended=ended, waited=waited, jobs=jobs, left=left
        )
        self.say(f"{lane.title}: {kind}: {recovery or ended or 'not within the cap'}, {jobs}, left behind: {left}")
        return outcome

    def _wait_for_mid_epoch(self, training: Training) -> None:
        epoch = self.workload.epoch_steps
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            step = step_log.newest_step(training.log())
            if step > epoch and epoch // 2 <= step % epoch < 2 * epoch // 3:
                return
            time.sleep(0.5)
        raise SystemExit(f"{training.name} has not trained within {_PATIENCE_SECONDS:.0f} s: {training.jobs()}")

    def _wait(
        self, training: Training, failure: failures.Failure, *, patience: float
    ) -> tuple[step_log.Recovery | None, str | None]:
        """Until it has made a step, or its job has ended, or the patience is over."""
        ended_at = None
        while time.time() < failure.at + patience:
            for _ in range(20):
                if found := step_log.recovery(training.log(), failure.at):
                    return found, None
                time.sleep(0.25)
            if training.jobs():
                ended_at = None
            elif ended_at is None:
                ended_at = time.monotonic()
            elif time.monotonic() - ended_at > _ENDED_SECONDS:
                states = {job.state for job in squeue(f"--jobs={training.job_id}")}
                return None, "job ended: " + (", ".join(sorted(states)) or "forgotten")
        return None, None

    def _end(self, lane: Lane, training: Training) -> None:
        """Cancel it, and look at what remains on its nodes."""
        names = {name for job in training.jobs() for name in job.nodes}
        names |= {entry["host"] for entry in training.log() if entry["event"] == "start"}
        training.cancel()
        deadline = time.monotonic() + 60
        while training.jobs() and time.monotonic() < deadline:
            time.sleep(1)
        # Of nodes that another training has got meanwhile nothing can be said.
        busy = {name for job in squeue() if job.state in {"RUNNING", "COMPLETING"} for name in job.nodes}
        self.left_at_the_end[f"{lane.title} ({training.name})"] = failures.left_at_the_end(names - busy)


def _fate(training: Training, before: set[str], failure: failures.Failure) -> str:
    """What became of the job."""
    jobs = [job for job in training.jobs() if job.state in {"RUNNING", "PENDING"}]
    if not jobs:
        return "no job"
    if {job.id for job in jobs} - before:
        return "new job"
    done = subprocess.run(["scontrol", "--oneliner", "show", "job", jobs[0].id], capture_output=True, text=True, check=True)
    started = done.stdout.partition(" StartTime=")[2].partition(" ")[0]
    is_later = started == "Unknown" or time.mktime(time.strptime(started, "%Y-%m-%dT%H:%M:%S")) > failure.at
    return "requeued" if is_later else "same job"


@contextmanager
def supervised(runs_dir: Path) -> Iterator[None]:
    """`hpc supervise` for these runs."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "hpc", "supervise", "--interval=1s", f"--runs-dir={runs_dir}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as supervisor:
        try:
            yield
        finally:
            supervisor.terminate()


# In place, without a part of Slurm: torchrun restarts the ranks.
_IN_PLACE = {"ours", "spare", "submitit", "ft_launcher"}


def lanes(options: Options) -> list[Lane]:
    """Who fails when: what waits for Slurm at the same time as the others' waits."""
    found = []
    for contender in (CONTENDERS[key] for key in options.contenders):
        if contender.key == "spare":
            plans = [((("node killed", options.repeats),), False)]
        elif contender.is_ours:
            # One after another: each takes seconds, and the nodes of one run are enough.
            rest = [(kind, options.repeats) for kind in ("hung", "node killed", "head node killed")]
            plans = [
                ((("worker killed", options.repeats), *rest, ("preempted", 1)), False),
                ((("preempted", options.repeats),), True),
            ]
        elif contender.key in _IN_PLACE:
            plans = [
                ((("worker killed", options.repeats), ("node killed", 1), ("head node killed", 1)), False),
                ((("preempted", options.repeats), ("hung", 1)), False),
            ]
        else:
            plans = [
                ((("node killed", 1), ("head node killed", 1)), False),
                ((("worker killed", 1), ("preempted", options.repeats), ("hung", 1)), False),
            ]
        for index, (plan, is_supervised) in enumerate(plans):
            kept = tuple((kind, repeats) for kind, repeats in plan if kind in options.kinds)
            is_later = index > 0 or contender.key not in _IN_PLACE or contender.key == "spare"
            if kept:
                found.append(Lane(contender=contender, plan=kept, supervised=is_supervised, after_turns=is_later))
    return found


def rows(outcomes: Sequence[Outcome], cap: float) -> list[dict[str, Any]]:
    """A row for each contender and kind, with medians."""
    found = []
    for kind in failures.KINDS:
        titles = dict.fromkeys(outcome.title for outcome in outcomes if outcome.kind == kind)
        for title in titles:
            same = [outcome for outcome in outcomes if (outcome.kind, outcome.title) == (kind, title)]
            back = [outcome.recovery for outcome in same if outcome.recovery]
            seconds = sorted(each.seconds for each in back)
            lost = same[-1].ended or f"not within {cap:.0f} s"
            found.append({
                "failure": kind,
                "contender": title,
                "times": len(same),
                "seconds": round(median(seconds), 1) if seconds else None,
                "range": f"{seconds[0]} to {seconds[-1]}" if len(seconds) > 1 else "",
                "steps lost": round(median(each.steps_lost for each in back)) if back else None,
                "starts": round(median(each.starts for each in back)) if back else None,
                "job": same[-1].jobs,
                "not back": "" if len(back) == len(same) else lost,
                "left behind": same[-1].left,
            })
    return found


def goals(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times faster ours is than the best rival."""
    found = []
    for kind in dict.fromkeys(row["failure"] for row in table):
        same = [row for row in table if row["failure"] == kind and row["seconds"] is not None]
        ours = [row for row in same if row["contender"].startswith("ours")]
        rivals = [row for row in same if not row["contender"].startswith("ours")]
        for mine in ours:
            best = min(rivals, key=lambda row: row["seconds"], default=None)
            fewest = min((row["steps lost"] for row in rivals), default=None)
            found.append({
                "failure": kind,
                "contender": mine["contender"],
                "seconds": mine["seconds"],
                "best rival": best["contender"] if best else "none came back",
                "its seconds": best["seconds"] if best else None,
                "times faster": round(best["seconds"] / mine["seconds"], 1) if best else None,
                "steps lost": mine["steps lost"],
                "fewest of a rival": fewest,
            })
    return found


def main() -> None:
    """Build a testbed, play, print, record."""
    options = tyro.cli(Options)
    if options.small:
        options = Options(
            rivals=options.rivals, contenders=("ours", "submitit"), kinds=("worker killed",), repeats=1,
            images=2560, wait=options.wait, cap=120, small=True,
        )  # fmt: skip
    plan = lanes(options)
    used = {package: None for key in options.contenders for package in CONTENDERS[key].packages}
    measured_on = {**record.machine(()), "rivals": _versions(options.rivals, list(used))}
    # Each lane may have lost a node, and gets others after a preemption.
    failures.build_testbed(min(32, NODES * len(plan) + 6), SLURMD_TIMEOUT)
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-recovery-") as directory:
        comparison = Comparison(options, Path(directory))
        try:
            with supervised(Path(directory) / "supervised"):
                comparison.play(plan)
        finally:
            subprocess.run([sys.executable, "-m", "hpc", "testbed", "down"], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            found = rows(comparison.outcomes, options.cap)
            print(record.table(found), "\n")
            print(record.table(goals(found)), "\n")
            for title, left in comparison.left_at_the_end.items():
                print(f"left on the nodes after the end: {title}: {left}")
    if not options.small:
        more = {"goals": goals(found), "left_at_the_end": comparison.left_at_the_end, "cap_seconds": options.cap}
        record.write("recovery", measured_on, found, **more)


def _versions(python: Path, packages: list[str]) -> dict[str, str]:
    """Of distributions in the rivals' environment."""
    code = "import sys; from importlib.metadata import version; [print(version(name)) for name in sys.argv[1:]]"
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, done.stdout.split(), strict=True))


if __name__ == "__main__":
    main()
