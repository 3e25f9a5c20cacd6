"""Recovery against rivals: the same training, the same failures, on the testbed's Slurm.

    .venv/bin/python -m benchmarks.recovery

Each contender (`contenders.py`) trains on 2 nodes with a rank each. A failure comes in the middle of an epoch, after at
least one whole epoch: a rival that saves once an epoch loses half of one, as it does on average. Measured in the steps
that rank 0 logs (`step_log.py`): the seconds from the failure to the first step of ranks that were started afterwards,
and the steps that the restored state does not have. The cost of a failure is these seconds and those in which the lost
steps are made again.

Several contenders train at once, each on nodes of its own, so that the minutes for which Slurm lets the rivals wait
overlap. A step is mostly a wait (`rivals/common.py`), so the cores are idle but for starts. Killed workers come first,
when nobody else starts, and one contender after another. Our own trainer, which computes without a wait, is measured
before all others. Rivals get no help of our supervisor; ours has it in the rows that say so.

Slurm's defaults hold: SlurmdTimeout is 300 s, and a requeued job may start after 120 s. The partition has a GraceTime
of 20 s. On preemption a job gets the signal that it has asked for (`preempt_send_user_signal`), as the documentation of
submitit and Lightning wants it.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import Findings, RivalFlags, Row, benchmark
from benchmarks.hpc_commands import supervised
from benchmarks.recovery import failures
from benchmarks.recovery.comparison import WORKER_KILLED, Comparison, Lane, Outcome
from benchmarks.recovery.contenders import CONTENDERS, NODES, Contender, Workload, versions_of

# More would need more neighbours than the kernel has room for.
_MAX_TESTBED_NODES = 30
_ALONE, _WITH_OTHERS, _SLOW = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Options(RivalFlags):
    """How much to compare."""

    contenders: tuple[str, ...] = tuple(CONTENDERS)
    """Contenders, by their keys in `contenders.py`."""
    kinds: tuple[str, ...] = tuple(failures.KINDS)
    """Kinds of failures."""
    repeats: int = 3
    """How often each failure meets ours, and a killed worker a rival; a rival is preempted twice at most, and all else
    happens to it once."""
    cap: float = 600.0
    """Seconds after which a training that has not come back counts as lost."""
    hang_cap: float = 180.0
    """Seconds after which a hung training that has not come back counts as lost."""
    wait: float = 0.2
    """Seconds of each step beside the network."""
    images: int = 20_000
    """Images of an epoch."""


def lanes(options: Options) -> list[Lane]:
    """Return who fails when. What waits for Slurm does so at the same time as the others' waits."""
    found = []
    for contender in (CONTENDERS[key] for key in options.contenders):
        for stage, is_supervised, plan in _plans(contender, options.repeats):
            kept = tuple((kind, repeats) for kind, repeats in plan if kind in options.kinds)
            if kept:
                found.append(Lane(contender=contender, plan=kept, supervised=is_supervised, stage=stage))
    return found


def _plans(contender: Contender, repeats: int) -> list[tuple[int, bool, tuple[tuple[str, int], ...]]]:
    """Return the stage of each lane, whether it is supervised, and its kinds with their numbers."""
    if contender.key == "trainer":
        return [(_ALONE, True, tuple((kind, repeats if kind == WORKER_KILLED else 1) for kind in failures.KINDS))]
    if contender.key == "spare":
        return [(_SLOW, False, (("node killed", repeats),))]
    if contender.is_ours:
        rest = [(kind, repeats) for kind in ("hung", "node killed", "head node killed")]
        return [
            (_WITH_OTHERS, False, ((WORKER_KILLED, repeats), *rest, ("preempted", 1))),
            (_SLOW, True, (("preempted", repeats),)),
        ]
    # Each of the two takes as long as the other: a dead node, and Slurm's waits.
    first = (WORKER_KILLED, repeats if contender.restarts_in_place else 1), ("hung", 1), ("node killed", 1)
    second = ("preempted", min(repeats, 2)), ("head node killed", 1)
    return [(_WITH_OTHERS if contender.restarts_in_place else _SLOW, False, first), (_SLOW, False, second)]


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each failure and contender, with medians."""
    found = list[Row]()
    for kind in failures.KINDS:
        for title in dict.fromkeys(outcome.title for outcome in outcomes if outcome.kind == kind):
            same = [outcome for outcome in outcomes if (outcome.kind, outcome.title) == (kind, title)]
            back = [(outcome.recovery, outcome.work_lost) for outcome in same if outcome.recovery]
            row: dict[str, object] = {"failure": kind, "contender": title, "times": len(same)}
            row |= dict.fromkeys(("seconds", "from", "to", "steps_lost", "work_lost_s", "cost_s"))
            if back:
                seconds = [recovery.seconds for recovery, _ in back]
                row |= {
                    "seconds": round(median(seconds), 1), "from": min(seconds), "to": max(seconds),
                    "steps_lost": round(median(recovery.steps_lost for recovery, _ in back)),
                    "work_lost_s": round(median(lost for _, lost in back), 1),
                    "cost_s": round(median(recovery.seconds + lost for recovery, lost in back), 1),
                }  # fmt: skip
            found.append(row)
    return found


def measure(options: Options) -> Findings:
    """Build a testbed, and play all lanes on it."""
    plan = lanes(options)
    rivals = versions_of(options.rivals, options.contenders)
    workload = Workload(rivals=options.rivals, images=options.images, wait=options.wait)
    caps = dict.fromkeys(failures.KINDS, options.cap) | {"hung": options.hang_cap}
    # A lane may have lost a node, and gets others after a preemption.
    failures.build_testbed(min(_MAX_TESTBED_NODES, NODES * len(plan) + 6))
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-recovery-") as directory:
        comparison = Comparison(workload, Path(directory), caps)
        try:
            with supervised(Path(directory) / "supervised"):
                comparison.play(plan)
        finally:
            failures.end_testbed()
    setting = {"epoch_steps": workload.epoch_steps, "slurmd_timeout": failures.SLURMD_TIMEOUT}
    return Findings(tables={"rows": rows_of(comparison.outcomes)}, more={"rivals": rivals, **setting})


if __name__ == "__main__":
    small = {"contenders": ("ours", "submitit"), "kinds": (WORKER_KILLED,), "repeats": 1, "cap": 120.0, "images": 2560}
    benchmark("recovery", Options(), measure, small=small, packages=("torch",))
