"""What the measured recoveries mean for long trainings on 8 to 16,384 GPUs: a simulation, no measurement.

    .venv/bin/python -m benchmarks.recovery      # writes benchmarks/results/recovery.json
    .venv/bin/python -m benchmarks.projection

Reads the seconds from each kind of failure to the first new step, as benchmarks/recovery measured them for us and
for the rivals, and simulates a training of 30 productive days with published failure rates (`failure_model.py`).
Prints the goodput by size.

From publications:
  - mean times to failure: 47.7 days at 8 GPUs, 7.9 h at 1,024, and 1.8 h at 16,384, which is itself a projection
    (Kokolis et al., arXiv 2410.21680). At 128 GPUs: the time to failure of a node, interpolated between 8 and 1,024;
  - the mix of failures: the 419 unexpected interruptions of 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783,
    table 5).
Measured, but on 2 cores, on 2 nodes, with a small model, and --hang-timeout 10s: the seconds of recovery. What large
jobs take longer for is added by a flag.
Assumed:
  - data parallel training, so each node has the whole state in memory; a node dies with its snapshots;
  - the training waits for the copy of a state to the host's memory, none of which computation hides;
  - a failure of a GPU, a host or its network card costs the node; software and dependency bugs cost a process; what a
    switch, a cable or a watchdog of NCCL reports is a hang;
  - the lost node's place is free at once, for all contenders: no wait in the queue;
  - nobody notices a failure from which a contender did not recover by itself before `--person-hours`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Findings, Flags, Row, benchmark, say
from benchmarks.projection.failure_model import FailureKind, Job, Restart, train, young_interval

# What benchmarks/recovery calls ours: without a spare node, and with one, of which it measures one failure.
OURS, SPARE = "ours", "ours, with a spare node"
_NODE_GPUS, _HOUR, _DAY = 8, 3600.0, 86_400.0
_SECONDS_BETWEEN_OUR_CHECKPOINTS = 600.0  # the default of --checkpoint-every
_SNAPSHOT_SHARE = 0.005  # of the time: the limit of --snapshot-every auto
# Kokolis et al. (see above).
_MTTF_HOURS = {8: 47.7 * 24, 1024: 7.9, 16_384: 1.8}
SIZES = (8, 128, 1024, 16_384)
# Shares of lost nodes, crashed processes and hangs in Llama 3's 419: GPUs 148 + 72 + 19 + 17 + 6 + 6, hosts 7 + 3 + 3 +
# 2 + 2 + 2 + 2, maintenance 32; bugs 54 + 2; network 35 and watchdog 7.
_MIX = (321 / 419, 56 / 419, 42 / 419)
# What benchmarks/recovery calls them.
WORKER, NODE, HEAD, HUNG = "worker killed", "node killed", "head node killed", "hung"
Seconds = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """The assumptions."""

    recovery: Path = RESULTS / "recovery.json"
    """The measured recoveries."""
    days: float = 30.0
    """Productive days of the training."""
    state_gb: float = 4.0
    """Weights and optimizer: ViT-L with AdamW has 3.65 GB."""
    storage_gb_per_second: float = 1.0
    """What one node writes to and reads from shared storage, and checksums into its memory."""
    copy_gb_per_second: float = 25.0
    """The copy from a GPU to its host, for which our training waits (PCIe 4.0; rivals wait for the storage instead)."""
    startup_seconds_per_1000_gpus: float = 3.0
    """Seconds added to each restart, for process groups. 3 s are the 30 s on 10,000 GPUs of arXiv 2402.15627."""
    person_hours: float = 1.0
    """Hours until a person restarts what did not recover."""
    half_width: float = 0.001
    """Half the width of the confidence interval of 95 % of each goodput."""
    seed: int = 19
    """Seed of the failures, which have the same times for all contenders."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to train, with its checkpoints."""

    name: str
    seconds: Seconds
    """The measured seconds by kind of failure; None: it did not recover by itself."""
    snapshots: bool = False
    background: bool = False
    """Whether the training goes on while a checkpoint is written."""
    spares: int = 0
    every: float | None = None
    """Seconds between checkpoints; None: what Young found best, but not before the one before is written."""


def mttf_seconds(gpus: int) -> float:
    """Return the mean time to failure of a job; between published sizes that of a node is interpolated."""
    if gpus in _MTTF_HOURS:
        return _MTTF_HOURS[gpus] * _HOUR
    below, above = (max(n for n in _MTTF_HOURS if n < gpus), min(n for n in _MTTF_HOURS if n > gpus))
    at = math.log(gpus / below) / math.log(above / below)
    of_node = [math.log(_MTTF_HOURS[n] * n) for n in (below, above)]
    return math.exp(of_node[0] + at * (of_node[1] - of_node[0])) / gpus * _HOUR


def read_recoveries(path: Path) -> dict[str, Seconds]:
    """Return the median seconds from a failure to the first new step: of each contender, by kind of failure."""
    if not path.exists():
        raise SystemExit(f"{path} is missing: type .venv/bin/python -m benchmarks.recovery, which writes it")
    found = dict[str, dict[str, float | None]]()
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        found.setdefault(row["contender"], {})[row["failure"]] = row["seconds"]
    if SPARE in found:
        found[SPARE] = {**found.get(OURS, {}), **found[SPARE]}
    needed = {WORKER, NODE, HEAD, HUNG}
    for name, seconds in found.items():
        if missing := needed - seconds.keys():
            say(f"{name} is left out: {path} has nothing of {', '.join(sorted(missing))}")
    whole: dict[str, Seconds] = {name: seconds for name, seconds in found.items() if needed <= seconds.keys()}
    if OURS not in whole:
        raise SystemExit(f"{path} does not have all failures of {OURS!r}: type .venv/bin/python -m benchmarks.recovery")
    return whole


def contenders(recoveries: Mapping[str, Seconds]) -> Iterator[Contender]:
    """Return ours with its default interval and others, and each rival with the best interval and a usual one."""
    every = _SECONDS_BETWEEN_OUR_CHECKPOINTS
    snapshots = Contender(name=OURS, seconds=recoveries[OURS], snapshots=True, background=True, every=every)
    if SPARE in recoveries:
        yield replace(snapshots, name=SPARE, seconds=recoveries[SPARE], spares=1)
    yield snapshots
    yield replace(snapshots, name="ours without snapshots", snapshots=False)
    yield replace(snapshots, name="ours without snapshots, best interval", snapshots=False, every=None)
    for name, seconds in recoveries.items():
        if not name.startswith(OURS):
            yield Contender(name=f"{name}, best interval", seconds=seconds)
            yield Contender(name=f"{name}, every hour", seconds=seconds, every=_HOUR)


def job_of(contender: Contender, gpus: int, options: Options) -> Job:
    """Return one contender's training on this many GPUs."""
    nodes, mttf = max(1, gpus // _NODE_GPUS), mttf_seconds(gpus)
    written = options.state_gb / options.storage_gb_per_second
    copied = options.state_gb / options.copy_gb_per_second
    stall = copied if contender.background else written
    background = written if contender.background else 0.0
    added = written + options.startup_seconds_per_1000_gpus * gpus / 1000

    def after(failure: str, saving: float = 0.0) -> float:
        seconds = contender.seconds[failure]
        return (options.person_hours * _HOUR if seconds is None else seconds) + added + saving

    # A new job's first state is that of a surviving node's memory, which writes it to the storage first.
    saving = written if contender.snapshots and nodes > 1 else 0.0
    node, process, hang = _MIX
    head = 1 / nodes
    kinds = (
        FailureKind(
            name=NODE, share=node * (1 - head), seconds=after(NODE, 0.0 if contender.spares else saving),
            restart=Restart.SPARE if contender.spares else Restart.NEW_JOB, keeps_snapshots=True,
        ),
        FailureKind(
            name=HEAD, share=node * head, seconds=after(HEAD, saving), restart=Restart.NEW_JOB,
            keeps_snapshots=nodes > 1,
        ),
        FailureKind(
            name=WORKER, share=process, seconds=after(WORKER), restart=Restart.IN_PLACE, keeps_snapshots=True
        ),
        FailureKind(
            name=HUNG, share=hang, seconds=after(HUNG), restart=Restart.IN_PLACE,
            keeps_snapshots=True,
        ),
    )  # fmt: skip
    return Job(
        mttf=mttf, kinds=kinds, stall=stall, background=background,
        interval=contender.every or max(young_interval(stall, mttf), background),
        # As --snapshot-every auto: a second, or longer where copies would take too much of the time; one at a time.
        snapshot_interval=max(1.0, copied / _SNAPSHOT_SHARE, written) if contender.snapshots else None,
        snapshot_stall=copied, snapshot_background=written,
        spares=contender.spares, new_job=after(HEAD, saving),
    )  # fmt: skip


def row_of(contender: Contender, gpus: int, options: Options) -> Row:
    """Simulate one contender on this many GPUs."""
    job = job_of(contender, gpus, options)
    goodput, half_width = train(job, options.days * _DAY, (options.seed, gpus), half_width=options.half_width)
    nodes = max(1, gpus // _NODE_GPUS)
    say(f"{gpus} GPUs, {contender.name}: {goodput:.3f}")
    return {
        "contender": contender.name, "gpus": gpus, "mttf_hours": round(job.mttf / _HOUR, 1),
        "checkpoint_every_minutes": round(job.interval / 60, 1), "goodput": round(goodput, 4),
        "half_width": round(half_width, 4),
        "goodput_of_allocated_nodes": round(goodput * nodes / (nodes + job.spares), 4),
        "stored_gb_per_hour": round(options.state_gb * _HOUR / job.interval, 1),
    }  # fmt: skip


def by_size(rows: list[Row]) -> list[Row]:
    """Return the goodput with its interval, a column for each size."""
    found = dict[str, dict[str, Any]]()
    for row in rows:
        line = found.setdefault(row["contender"], {"contender": row["contender"]})
        line[f"{row['gpus']:,} GPUs"] = f"{row['goodput']:.3f} ± {row['half_width']:.3f}"
    return list(found.values())


def measure(options: Options) -> Findings:
    """Simulate all contenders on all numbers of GPUs."""
    recoveries = read_recoveries(options.recovery)
    rows = [row_of(one, gpus, options) for gpus in SIZES for one in contenders(recoveries)]
    return Findings(tables={"by_size": by_size(rows), "rows": rows}, more={"recoveries": recoveries})


if __name__ == "__main__":
    benchmark("projection", Options(), measure, small={"days": 3.0, "half_width": 0.02}, packages=("numpy",))
