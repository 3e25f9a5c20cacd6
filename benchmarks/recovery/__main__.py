"""Recovery against rivals: the same training, the same failures, on the testbed's Slurm.

    .venv/bin/python -m benchmarks.recovery --rivals rivals/bin/python

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
submitit and Lightning wants it; with `--no-user-signal` it gets SIGTERM, Slurm's default.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from benchmarks import record
from benchmarks.hpc_commands import supervised
from benchmarks.recovery import failures
from benchmarks.recovery.comparison import WORKER_KILLED, Comparison, Lane, Outcome
from benchmarks.recovery.contenders import CONTENDERS, NODES, Contender, Workload

SLURMD_TIMEOUT = 300
# More would need more neighbours than the kernel has room for.
_MAX_TESTBED_NODES = 30
_ALONE, _WITH_OTHERS, _SLOW = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the recoveries of ours and of the rivals."""

    rivals: Path = record.RIVALS
    """The rivals' Python."""
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    """Which ones."""
    kinds: tuple[str, ...] = tuple(failures.KINDS)
    """Which failures."""
    repeats: int = 3
    """Of each failure of ours, and of a rival's killed worker; a rival is preempted twice at most, and all else happens
    to it once."""
    cap: float = 600.0
    """Seconds after which a training that has not come back counts as lost."""
    hang_cap: float = 180.0
    """The same for hangs."""
    wait: float = 0.2
    """Seconds of each step beside the network."""
    images: int = 20_000
    """Of an epoch."""
    user_signal: bool = True
    """Slurm preempts with the signal that the job has asked for, if it has."""
    small: bool = False
    """Only ours and submitit, a killed worker, once, with short epochs; nothing is recorded."""

    def resolved(self) -> "Options":
        """With what `small` means."""
        if not self.small:
            return self
        return Options(
            rivals=self.rivals, contenders=("ours", "submitit"), kinds=(WORKER_KILLED,), repeats=1, cap=120.0,
            wait=self.wait, images=2560, small=True,
        )  # fmt: skip


def lanes(options: Options) -> list[Lane]:
    """Who fails when. What waits for Slurm does so at the same time as the others' waits."""
    found = []
    for contender in (CONTENDERS[key] for key in options.contenders):
        for stage, is_supervised, plan in _plans(contender, options.repeats):
            kept = tuple((kind, repeats) for kind, repeats in plan if kind in options.kinds)
            if kept:
                found.append(Lane(contender=contender, plan=kept, supervised=is_supervised, stage=stage))
    return found


def _plans(contender: Contender, repeats: int) -> list[tuple[int, bool, tuple[tuple[str, int], ...]]]:
    """The stage of a lane, whether it is supervised, and its kinds with their numbers."""
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


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each failure and contender, with medians."""
    found = []
    for kind in failures.KINDS:
        for title in dict.fromkeys(outcome.title for outcome in outcomes if outcome.kind == kind):
            same = [outcome for outcome in outcomes if (outcome.kind, outcome.title) == (kind, title)]
            back = [outcome.recovery for outcome in same if outcome.recovery]
            costs = [outcome.recovery.seconds + outcome.work_lost for outcome in same if outcome.recovery]
            seconds = sorted(each.seconds for each in back)
            found.append(
                {
                    "failure": kind,
                    "contender": title,
                    "times": len(same),
                    "seconds": round(median(seconds), 1) if back else None,
                    "from": seconds[0] if back else None,
                    "to": seconds[-1] if back else None,
                    "steps_lost": round(median(each.steps_lost for each in back)) if back else None,
                    "work_lost_s": round(median(outcome.work_lost for outcome in same if outcome.recovery), 1)
                    if back
                    else None,
                    "cost_s": round(median(costs), 1) if back else None,
                    "starts": round(median(each.starts for each in back)) if back else None,
                    "gpu_seconds": round(median(outcome.held for outcome in same)),
                    "job": same[-1].job,
                    "not_back": None if len(back) == len(same) else same[-1].ended,
                    "left_behind": same[-1].left,
                }
            )
    return found


def goals(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times faster ours is than the best rival, and how many times cheaper than the cheapest one.

    The cost of a failure is the time until the training makes steps again, and that in which it makes the lost ones.
    """
    found = []
    for kind in dict.fromkeys(row["failure"] for row in table):
        same = [row for row in table if row["failure"] == kind and row["seconds"] is not None]
        rivals = [row for row in same if not row["contender"].startswith("ours")]
        best = min(rivals, key=lambda row: float(row["seconds"]), default=None)
        cheapest = min(rivals, key=lambda row: float(row["cost_s"]), default=None)
        found += [
            {
                "failure": kind,
                "contender": mine["contender"],
                "seconds": mine["seconds"],
                "best_rival": best["contender"] if best else "none came back",
                "its_seconds": best["seconds"] if best else None,
                "times_faster": round(best["seconds"] / mine["seconds"], 1) if best else None,
                "cost_s": mine["cost_s"],
                "cheapest_rival": cheapest["contender"] if cheapest else "none came back",
                "its_cost_s": cheapest["cost_s"] if cheapest else None,
                "times_cheaper": round(cheapest["cost_s"] / mine["cost_s"], 1) if cheapest else None,
                "work_lost_s": mine["work_lost_s"],
                "least_of_a_rival_s": min((row["work_lost_s"] for row in rivals), default=None),
            }
            for mine in same
            if mine["contender"].startswith("ours")
        ]
    return found


def versions(python: Path, keys: Sequence[str]) -> dict[str, str]:
    """Of the contenders' distributions, in the rivals' environment."""
    packages = list(dict.fromkeys(package for key in keys for package in ("torch", *CONTENDERS[key].packages)))
    code = "import sys; from importlib.metadata import version; [print(version(name)) for name in sys.argv[1:]]"
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, done.stdout.split(), strict=True))


def main() -> None:
    """Build a testbed, play, print, record."""
    options = tyro.cli(Options).resolved()
    plan = lanes(options)
    measured_on = {**record.machine(), "rivals": versions(options.rivals, options.contenders)}
    workload = Workload(rivals=options.rivals, images=options.images, wait=options.wait)
    # A lane may have lost a node, and gets others after a preemption.
    failures.build_testbed(
        min(_MAX_TESTBED_NODES, NODES * len(plan) + 6), SLURMD_TIMEOUT, user_signal=options.user_signal
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-recovery-") as directory:
        caps = dict.fromkeys(failures.KINDS, options.cap) | {"hung": options.hang_cap}
        comparison = Comparison(workload, Path(directory), caps)
        try:
            with supervised(Path(directory) / "supervised"):
                comparison.play(plan)
        finally:
            failures.end_testbed()
            found = rows(comparison.outcomes)
            print(*(record.table(each) for each in (found, goals(found)) if each), sep="\n\n", end="\n\n")
            print("left on the nodes when the training was cancelled")
            print(*(f"  {title}: {left}" for title, left in comparison.left_at_the_end.items()), sep="\n")
    if not options.small:
        record.write(
            "recovery", measured_on, found, goals=goals(found), left_at_the_end=comparison.left_at_the_end,
            cap_seconds=caps, user_signal=options.user_signal, slurmd_timeout=SLURMD_TIMEOUT,
            epoch_steps=workload.epoch_steps, step_wait_seconds=options.wait, global_batch=workload.batch_size,
        )  # fmt: skip


if __name__ == "__main__":
    main()
