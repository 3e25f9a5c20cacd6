"""`hpc drill`: break a run on purpose, wait until it trains again, and say what that cost. Runs on the login node.

As the run's owner and through Slurm, so on the testbed as well as in a real allocation. Only on the testbed a node's
power can be cut and an urgent job submitted: elsewhere all processes of the run on that node are killed, and its job is
requeued.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from hpc import cli
from hpc.core import ledger
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from hpc.slurm.client import running_slurm_conf
from hpc.spec import RunSpec
from hpc.status.__main__ import print_interruptions, summaries
from hpc.status.downtime import Interruption, interruptions_of
from hpc.status.run_view import TERMINAL, Summary

Kind = Literal["worker-kill", "node-kill", "preempt", "hang", "term", "disk-full"]
_POLL_SECONDS = 1.0
# Longer than Slurm takes to notice a dead node (SlurmdTimeout, 300 s) and to start a requeued job (120 s).
_PATIENCE_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class DrillOptions(cli.Common):
    """Break a run on purpose, wait until it trains again, and say what that cost."""

    run: tyro.conf.Positional[str]
    """Run directory or name."""
    kind: tyro.conf.Positional[Kind]
    """What to do to it."""
    runs_dir: Path = Path("runs")
    """Directory of the runs."""
    rank: int | None = None
    """The rank for worker-kill and hang; by default the last."""
    node: str | None = None
    """The node for node-kill; by default the last, which is not the head unless it is the only one."""
    yes: bool = False
    """Do not ask."""


@dataclass(frozen=True, kw_only=True)
class DrillTarget:
    """What a drill hits."""

    run: RunDir
    cluster: str
    job_id: str
    nodes: tuple[str, ...]
    """Those that train."""
    node: str
    rank: int
    testbed: bool


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    return cli.run(drill, DrillOptions, argv, "drill")


def drill(options: DrillOptions) -> int:
    """Ask, break, wait, tell."""
    run = cli.find_run(options.run, options.runs_dir)
    target = target_of(options, run, summaries([run])[0])
    command, does = plan(options.kind, target)
    if not options.yes:
        _ask(f"{does} (run {run.name}, job {target.job_id})")
    before = len(interruptions_of(ledger.read(run.events)))
    said = slurm.run(*command)
    if options.kind in _RANKS and not said.strip():
        raise TorchrelayError(f"rank {target.rank} has no heartbeat on {' '.join(target.nodes)}: nothing was done")
    return _tell(options, run, _wait(run, options.kind, before))


def target_of(options: DrillOptions, run: RunDir, row: Summary) -> DrillTarget:
    """What the drill hits, from the flags and the status of the run.

    Raises:
        UserError: it does not train, or has no such rank or node.
    """
    if row["state"] != "running" or not row["world_size"]:
        raise UserError(f"run {run.name} does not train now: wait until hpc status {run.name} shows its steps")
    attempt = row["attempts"][-1]
    nodes = tuple(attempt["members"])
    others = [node for node in nodes if node != attempt["nodes"][0]]
    if options.node not in {None, *nodes}:
        raise UserError(f"--node is {options.node!r}: use one of {', '.join(nodes)}, where the run trains")
    last = 0 if options.kind == "disk-full" else int(row["world_size"]) - 1
    rank = last if options.rank is None else options.rank
    if not 0 <= rank < int(row["world_size"]):
        raise UserError(f"--rank is {rank}: use 0 to {int(row['world_size']) - 1}")
    cluster = RunSpec.load(run).cluster
    own = running_slurm_conf()
    return DrillTarget(
        run=run,
        cluster=cluster,
        job_id=row["job_id"],
        nodes=nodes,
        node=options.node or (others or nodes)[-1],
        rank=rank,
        testbed=cluster == "slurm" and own is not None and os.environ.get("SLURM_CONF") == str(own),
    )


_RANKS = {"worker-kill": "kill", "hang": "stop", "disk-full": "full"}
_DOES = {
    "worker-kill": "kill rank {rank} with SIGKILL",
    "hang": "stop rank {rank} with SIGSTOP",
    "disk-full": "let rank {rank} write no large file for 10 s",
}


def plan(kind: Kind, target: DrillTarget) -> tuple[list[str], str]:
    """The command that breaks the run, and what it does in words. Pure.

    Raises:
        UserError: without Slurm, and only Slurm can do it.
    """
    if kind in _RANKS:
        return on_nodes(target, target.nodes, _RANKS[kind], str(target.rank)), _DOES[kind].format(rank=target.rank)
    if target.cluster == "local":
        if kind != "term":
            raise UserError(f"{kind} needs Slurm, and this run is on --cluster local: use term, worker-kill or hang")
        return ["kill", "-TERM", target.job_id], "send SIGTERM to the run"
    power = f"{'cut the power of' if target.testbed else 'kill all processes of the run on'} {target.node}"
    commands = {
        "term": (_term(target), "send SIGTERM to all processes of the step"),
        "preempt": (_preempt(target), "preempt the job" if target.testbed else "requeue the job"),
        "node-kill": (_node_kill(target), power),
    }
    return commands[kind]


def on_nodes(target: DrillTarget, nodes: Sequence[str], *action: str) -> list[str]:
    """The command that has `hpc.drill.node_faults` act on nodes of the run, from the run's own snapshot of the code."""
    path = f"PYTHONPATH={target.run.packages}"
    helper = ["env", path, sys.executable, "-P", "-m", "hpc.drill.node_faults", str(target.run.path), *action]
    if target.cluster == "local":
        return helper
    return [
        "srun", f"--jobid={target.job_id}", "--overlap", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}",
        "--ntasks-per-node=1", "--gres=none", "--cpu-bind=none", "--mpi=none", *helper,
    ]  # fmt: skip


def _term(target: DrillTarget) -> list[str]:
    # The agents' step is the first one; the batch script, which is none, would die of it.
    return ["scancel", "--signal=TERM", f"{target.job_id}.0"]


def _preempt(target: DrillTarget) -> list[str]:
    if not target.testbed:
        return ["scontrol", "requeue", target.job_id]
    return [
        "sbatch", "--partition=urgent", "--exclusive", f"--nodes={len(target.nodes)}",
        f"--nodelist={','.join(target.nodes)}", "--job-name=drill", "--output=/dev/null", "--wrap=true",
    ]  # fmt: skip


def _node_kill(target: DrillTarget) -> list[str]:
    if target.testbed:
        return [sys.executable, "-m", "hpc", "testbed", "kill-node", target.node]
    return on_nodes(target, [target.node], "kill-all")


def _ask(what: str) -> None:
    """Let the user say yes.

    Raises:
        UserError: nobody is there, or said no.
    """
    if not sys.stdin.isatty():
        raise UserError(f"this would {what}: repeat it with --yes")
    print(f"{what}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise UserError("nothing was done")


def _wait(run: RunDir, kind: Kind, before: int) -> list[Interruption]:
    """Wait until the run trains again, or is over; the interruptions since."""
    checkpoints = _checkpoints(run)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        new = interruptions_of(ledger.read(run.events))[before:]
        if trains_again(new) or (kind == "disk-full" and not new and _checkpoints(run) > checkpoints):
            return new
        if summaries([run])[0]["state"] in TERMINAL:
            return new
    raise TorchrelayError(f"run {run.name} does not train again after {_PATIENCE_SECONDS:.0f} s: hpc status {run.name}")


def trains_again(new: Sequence[Interruption]) -> bool:
    """Whether the last of the interruptions, if there is any, is over."""
    return bool(new) and new[-1].seconds["first_step"] is not None


def _checkpoints(run: RunDir) -> int:
    return sum(event["event"] == "checkpoint_saved" for event in ledger.read(run.events))


def _tell(options: DrillOptions, run: RunDir, new: Sequence[Interruption]) -> int:
    row = summaries([run])[0]
    found = [asdict(interruption) for interruption in new]
    if options.json:
        cli.print_json({"run": run.name, "drill": options.kind, "state": row["state"], "interruptions": found})
    elif found:
        print_interruptions(found)
    else:
        print(f"run {run.name} was not interrupted")
    return 1 if row["state"] in {"failed", "cancelled"} else 0


if __name__ == "__main__":
    sys.exit(main())
