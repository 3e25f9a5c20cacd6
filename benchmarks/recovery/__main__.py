"""Recovery against rivals: the same training, the same failures, on the testbed's Slurm.

    .venv/bin/python -m benchmarks.recovery

Each contender (`contenders.py`) trains on 2 nodes with a rank each. A failure comes near the middle of an epoch, after
at least one whole epoch: a rival that saves once an epoch loses half of one, as it does on average. Measured in the
steps that rank 0 logs (`step_log.py`): the seconds from the failure to the first step of ranks that were started
afterwards, and the steps that the restored state does not have. The cost of a failure is these seconds and those in
which the lost steps are made again.

The built-in classifier, which computes without a wait, is measured before all others, by `hpc drill`. Then come all
failures after which training continues within seconds, in turns: no other training recovers at the same time. At last,
all others happen to several contenders at once, each on nodes of its own, so that the minutes for which Slurm lets them
wait overlap. A step is mostly a wait (`rivals/common.py`), so the cores are idle but for starts. No supervisor runs.

Slurm's defaults hold: SlurmdTimeout is 300 s, and a requeued job may start after 120 s. The partition has a GraceTime
of 20 s. On preemption a job gets the signal that it has asked for (`preempt_send_user_signal`), as the documentation of
submitit and Lightning wants it.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import drill
from benchmarks.harness import Findings, RivalFlags, Row, benchmark
from benchmarks.hpc_commands import hpc
from benchmarks.recovery import failures
from benchmarks.recovery.comparison import Lane, Outcome, Setting, play
from benchmarks.recovery.contenders import CLASSIFIER_TITLE, CONTENDERS, NODES, Contender, Workload, versions_of
from benchmarks.recovery.rivals.step_log import Recovery

WORKER_KILLED = "worker killed"
CLASSIFIER = "classifier"
# What `hpc drill` calls the failures.
_DRILLS = {
    WORKER_KILLED: "worker-kill", "node killed": "node-kill", "first node killed": "node-kill", "preempted": "preempt",
    "hung": "hang",
}  # fmt: skip
# What differs if a library saves.
_OF_LIBRARIES = (WORKER_KILLED, "node killed", "preempted")
# More would need more neighbours than the kernel has room for.
_MAX_TESTBED_NODES = 30


@dataclass(frozen=True, kw_only=True)
class Options(RivalFlags):
    """How much to compare."""

    contenders: tuple[str, ...] = (CLASSIFIER, *(key for key in CONTENDERS if key != "plain"))
    """Contenders, by their keys in `contenders.py`, and the built-in classifier."""
    kinds: tuple[str, ...] = tuple(failures.KINDS)
    """Kinds of failures."""
    repeats: int = 3
    """How often each failure meets each contender that comes back from it."""
    cap: float = 600.0
    """Seconds after which a training that has not come back counts as lost."""
    hang_cap: float = 180.0
    """Seconds after which a hung training that has not come back counts as lost."""
    images: int = 10_000
    """Images of an epoch."""


def lanes(options: Options, *, in_turns: bool) -> list[Lane]:
    """Return who fails when: where training continues within seconds (`in_turns`), or everywhere else."""
    found = []
    for contender in (CONTENDERS[key] for key in options.contenders if key != CLASSIFIER):
        for lane in _lanes(contender, options.repeats):
            kept = {kind: repeats for kind, repeats in lane.plan.items() if kind in options.kinds}
            if kept and lane.in_turns == in_turns:
                found.append(replace(lane, plan=kept))
    return found


def _lanes(contender: Contender, repeats: int) -> Iterator[Lane]:
    if contender.spares:
        # A spare for each repeat: without one, a new job would continue.
        yield Lane(contender=replace(contender, spares=repeats), plan={"node killed": repeats}, in_turns=True)
        return
    if contender.is_ours:
        kinds = _OF_LIBRARIES if contender.needs_library else failures.KINDS
        yield Lane(contender=contender, plan=dict.fromkeys(kinds, repeats), in_turns=True)
        return
    if contender.restarts_in_place:
        yield Lane(contender=contender, plan={WORKER_KILLED: repeats}, in_turns=True)
    # Each of the two takes as long as the other: a dead node, and Slurm's waits.
    slow = () if contender.restarts_in_place else (WORKER_KILLED,)
    yield Lane(contender=contender, plan=dict.fromkeys((*slow, "hung", "node killed"), repeats))
    yield Lane(contender=contender, plan=dict.fromkeys(("preempted", "first node killed"), repeats))


def drill_classifier(options: Options, directory: Path) -> list[Outcome]:
    """Return what became of the built-in classifier, on a run of its own."""
    run, found = drill.submit(directory), []
    for kind in options.kinds:
        for _ in range(options.repeats):
            drill.wait_for_steps(run, seconds=0.0)
            [head, *_, last] = drill.status(run)["attempts"][-1]["nodes"]
            victim = {"node killed": last, "first node killed": head}.get(kind)
            [*_, cost] = drill.play(run, _DRILLS[kind], *([f"--node={victim}"] if victim else []))
            recovery = Recovery(seconds=round(cost["seconds"]["total"], 1), steps_lost=cost["steps_lost"])
            lost = round(cost["steps_lost"] * drill.BATCH / drill.status(run)["images_per_second"], 1)
            found.append(Outcome(title=CLASSIFIER_TITLE, kind=kind, recovery=recovery, work_lost=lost))
            if victim:
                hpc("testbed", "revive-node", victim)
    hpc("cancel", str(run))
    return found


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
    """Build a testbed, and let everything fail on it."""
    in_turns, others = lanes(options, in_turns=True), lanes(options, in_turns=False)
    rivals = versions_of(options.rivals, [key for key in options.contenders if key != CLASSIFIER])
    workload = Workload(rivals=options.rivals, images=options.images)
    caps = dict.fromkeys(failures.KINDS, options.cap) | {"hung": options.hang_cap}
    # A lane may have lost a node, and gets others after a preemption.
    nodes = min(_MAX_TESTBED_NODES, NODES * max(len(in_turns), len(others)) + 6)
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-recovery-") as made,
        failures.usual_slurm(nodes),
    ):
        setting = Setting(workload=workload, directory=Path(made), caps=caps)
        outcomes = drill_classifier(options, Path(made)) if CLASSIFIER in options.contenders else []
        outcomes += play(in_turns, setting)
        outcomes += play(others, setting)
    more = {"rivals": rivals, "epoch_steps": workload.epoch_steps, "slurmd_timeout": failures.SLURMD_TIMEOUT}
    return Findings(tables={"rows": rows_of(outcomes)}, more=more)


if __name__ == "__main__":
    small = {
        "contenders": (CLASSIFIER, "ours", "submitit"), "kinds": (WORKER_KILLED,), "repeats": 1, "cap": 120.0,
        "images": 2560,
    }  # fmt: skip
    benchmark("recovery", Options, measure, small=small, packages=("torch",))
