"""Goodput in a storm: a fixed training, and the same seeded failures at the same times, for ours and for rivals.

    .venv/bin/python -m benchmarks.storm

The training of `rivals/` takes about three minutes without failures, from the submission to the last step. About once a
minute something fails: a rank is killed or stopped, a node loses its power and is back a while later, or the job is
preempted. The times count from the submission. A failure that meets no ranks, because the training has not come back
yet, is one less for it. Goodput is the wall time without failures over that with them. A training that is not complete
after twice its failure-free time is given up, and its goodput is an upper bound: the failure-free time times the
share of the steps that it has made, over the wall time.

First all train without failures, at once, each on nodes of its own; then all do in one storm after the other. No
supervisor runs. Slurm is set as for `benchmarks/recovery`.
"""

import random
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Findings, RivalFlags, Row, benchmark, say
from benchmarks.hpc_commands import hpc
from benchmarks.recovery import failures
from benchmarks.recovery.contenders import CONTENDERS, NODES, Training, Workload, versions_of
from benchmarks.recovery.rivals import step_log
from hpc.base.kernel import process_state
from hpc.cluster.testbed.lifecycle import revive_node
from hpc.run.causes import JobState
from hpc.slurm.client import hostnames

# Each five failures in a row are these in some order: ranks fail more often than nodes.
_MIX = ("worker killed", "worker killed", "hung", "preempted")
_NODE = ("node killed", "first node killed")
# A killed node then has its power back.
_BACK_AFTER_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Options(RivalFlags):
    """How long to train, and how much fails."""

    contenders: tuple[str, ...] = ("ours", "ft_launcher", "submitit")
    """Contenders, by their keys in `benchmarks/recovery/contenders.py`."""
    epochs: int = 5
    """Epochs of the training."""
    images: int = 10_000
    """Images of an epoch."""
    mean: float = 60.0
    """Seconds between two failures: of an exponential distribution."""
    seeds: tuple[int, ...] = (5, 6, 7)
    """Storms, each by the seed of its sequence of failures."""
    cap: float = 2.0
    """A training is given up after so many times its failure-free time."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A failure of the storm."""

    at: float
    """Seconds after the submission."""
    kind: str


def sequence(seed: int, mean: float, until: float) -> list[Planned]:
    """Return the failures of a storm: the same for the same seed and mean, however long it lasts."""
    generator, at = random.Random(seed), 0.0  # noqa: S311 - no secret
    found: list[Planned] = []
    kinds: list[str] = []
    while (at := at + generator.expovariate(1 / mean)) <= until:
        if not kinds:
            kinds = [*_MIX, generator.choice(_NODE)]
            generator.shuffle(kinds)
        found.append(Planned(at=round(at, 1), kind=kinds.pop()))
    return found


@dataclass(frozen=True, kw_only=True)
class Result:
    """A training in the storm, or without it."""

    title: str
    complete: bool
    seconds: float
    """The time from the submission to the last step, or until it was given up."""
    steps: int
    """Different steps that were made."""
    recomputed: int
    hit: int
    """Failures that met it."""
    missed: int
    """Failures that met no ranks."""
    interruptions: list[dict[str, Any]]
    """Of a run of ours: as `hpc status --json` has them."""


@dataclass(frozen=True, kw_only=True)
class Storm:
    """Failures at their times, and what they meet."""

    options: Options
    directory: Path
    name: str = "calm"
    planned: Sequence[Planned] = ()
    reviving: list[threading.Timer] = field(default_factory=list)
    """These boot the killed nodes again."""

    @property
    def workload(self) -> Workload:
        """The training."""
        return Workload(rivals=self.options.rivals, images=self.options.images, epochs=self.options.epochs)

    def train_all(self, caps: Mapping[str, float]) -> dict[str, Result]:
        """Let contenders train at once, each on nodes of its own, for so many seconds at most."""
        with ThreadPoolExecutor(max_workers=len(caps) or 1) as executor:
            futures = {}
            for key, cap in caps.items():
                futures[key] = executor.submit(self._train, key, cap)
                # So that their starts do not coincide.
                time.sleep(10)
        for timer in self.reviving:
            timer.join()
        return {key: future.result() for key, future in futures.items()}

    def _train(self, key: str, cap: float) -> Result:
        """Submit, let the failures happen at their times, and wait until the training is complete or given up."""
        began = time.time()
        name = f"{self.name}-{key}"
        training = CONTENDERS[key].start(self.directory / name, self.workload)
        met, left = list[bool](), list(self.planned)
        while not (ended_at := _ended_at(training)) and time.time() - began < cap:
            if left and time.time() - began >= left[0].at:
                met.append(self._strike(training, left.pop(0).kind))
            time.sleep(0.2)
        seconds = (ended_at or time.time()) - began
        log = training.log()
        useful = step_log.useful_steps(log)
        interruptions = hpc("status", str(training.directory))[0]["interruptions"] if training.contender.is_ours else []
        result = Result(
            title=training.contender.title, complete=ended_at is not None, seconds=round(seconds, 1), steps=useful,
            recomputed=sum(entry["event"] == "step" for entry in log) - useful,
            hit=sum(met), missed=len(met) - sum(met), interruptions=interruptions,
        )  # fmt: skip
        say(f"{name}: {'complete' if result.complete else 'given up'} after {result.seconds:.0f} s")
        if not result.complete:
            training.cancel()
        return result

    def _strike(self, training: Training, kind: str) -> bool:
        """Let something fail, and return whether there were ranks that it could meet."""
        # A rank may end at any time.
        with suppress(ProcessLookupError):
            if _has_ranks(training):
                failure = failures.KINDS[kind](training)
                say(f"{training.name}: {kind} at step {step_log.newest_step(training.log())}")
                if failure.killed_node:
                    self.reviving.append(threading.Timer(_BACK_AFTER_SECONDS, revive_node, [failure.killed_node]))
                    self.reviving[-1].start()
                return True
        say(f"{training.name}: {kind} meets no ranks")
        return False


def _ended_at(training: Training) -> float | None:
    """Return when rank 0 had made the last step; None: it has not."""
    return next((float(entry["time"]) for entry in training.log() if entry["event"] == "end"), None)


def _has_ranks(training: Training) -> bool:
    """Return whether its ranks train: both have started since its job has, and have not ended."""
    ranks = step_log.ranks(training.log())
    running = {name for job in training.jobs() if job.state is JobState.RUNNING for name in hostnames(job.nodes)}
    alive = [
        entry for entry in ranks.values() if process_state(entry["pid"]) not in {None, "Z"} and entry["host"] in running
    ]
    return len(alive) == NODES


def rows_of(seed: int, calm: Mapping[str, Result], storm: Mapping[str, Result], total_steps: int) -> list[Row]:
    """Return a row for each contender in a storm."""
    found = list[Row]()
    for key, result in storm.items():
        goodput = calm[key].seconds / result.seconds * min(result.steps / total_steps, 1)
        found.append({
            "storm": seed,
            "contender": result.title,
            "without_failures_s": calm[key].seconds,
            "in_the_storm_s": result.seconds,
            "complete": "yes" if result.complete else "given up",
            "steps": f"{result.steps} of {total_steps}",
            "recomputed": result.recomputed,
            "failures": result.hit,
            "without_ranks": result.missed,
            "goodput": f"{'' if result.complete else 'at most '}{goodput:.2f}",
        })  # fmt: skip
    return found


def measure(options: Options) -> Findings:
    """Train without failures, all at once; then in each storm, all at once."""
    keys = options.contenders
    rivals = versions_of(options.rivals, keys)
    rows, details, sequences = list[Row](), dict[str, Any](), dict[str, Any]()
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-storm-") as made,
        failures.usual_slurm(2 * NODES * len(keys) + 4),
    ):
        calm_weather = Storm(options=options, directory=Path(made))
        steps = options.epochs * calm_weather.workload.epoch_steps
        calm = calm_weather.train_all(dict.fromkeys(keys, 30 * steps * calm_weather.workload.wait))
        details["calm"] = {key: asdict(result) for key, result in calm.items()}
        caps = {key: options.cap * result.seconds for key, result in calm.items()}
        for seed in options.seeds:
            planned = sequence(seed, options.mean, max(caps.values()))
            say(", ".join(f"{each.at:.0f} {each.kind}" for each in planned))
            storm = Storm(options=options, directory=Path(made), name=f"storm-{seed}", planned=planned).train_all(caps)
            rows += rows_of(seed, calm, storm, steps)
            details[str(seed)] = {key: asdict(result) for key, result in storm.items()}
            sequences[str(seed)] = [asdict(each) for each in planned]
    return Findings(tables={"rows": rows}, more={"rivals": rivals, "details": details, "sequences": sequences})


if __name__ == "__main__":
    # A rank is killed after half a minute.
    small = {"contenders": ("ours",), "epochs": 3, "images": 10_000, "mean": 20.0, "seeds": (140,), "cap": 4.0}
    benchmark("storm", Options, measure, small=small, packages=("torch",))
