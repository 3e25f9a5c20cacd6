"""`hpc drill`: cause a failure in a run, wait until it trains again, and print the cost. Runs on the login node.

On the testbed, node-kill cuts a node's power, and needs root; preempt submits an urgent job. On other clusters,
node-kill kills all processes of the run on the node, and preempt requeues the run's job; both need no root.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Literal, TypeVar

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.flags import POSITIONAL, Flag
from hpc.commands import cli
from hpc.run.events.history import History
from hpc.run.events.interruptions import Interruption, interruptions_of
from hpc.run.events.kinds import FirstStep
from hpc.run.own_packages import own_pythonpath
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import client as slurm
from hpc.slurm.client import running_slurm_conf
from hpc.status.details import interruption_table
from hpc.status.printing import console_for, summaries
from hpc.status.summary import TERMINAL, Summary

Kind = Literal["worker-kill", "node-kill", "preempt", "hang"]
T = TypeVar("T")
_POLL_SECONDS = 1.0
# Longer than Slurm takes to notice a dead node (SlurmdTimeout, 300 s) and to start a requeued job (120 s) together.
_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class DrillOptions(cli.RunOptions):
    """Cause a failure in a run, wait until the run trains again, and print the lost steps and the lost time."""

    kind: Annotated[Kind, POSITIONAL]
    """Failure to cause: worker-kill or hang of a rank, node-kill of a node, or preempt of the job."""
    rank: int | None = None
    """Rank for worker-kill and hang. Default: the last rank."""
    node: Annotated[str | None, Flag(metavar="NAME")] = None
    """Node for node-kill. Default: the last node that is not the first node."""
    yes: bool = False
    """Do not ask for confirmation."""


@dataclass(frozen=True, kw_only=True)
class DrillTarget:
    """The run, node and rank that a drill acts on."""

    run: RunDir
    cluster: str
    job_id: str
    nodes: tuple[str, ...]
    """The nodes that train."""
    node: str
    rank: int
    testbed: bool


def drill(options: DrillOptions) -> int:
    """Ask, cause the failure, wait, and print the interruptions. Returns 1 if the run has failed or is cancelled."""
    run = cli.find_own_run(options.run, options.runs_dir)
    row = _with_ranks(run)
    if row is None:
        print(f"waiting until the ranks of run {run.name} have started", file=sys.stderr)
        row = _await(partial(_with_ranks, run), run, f"the ranks of run {run.name} have not started")
    target = target_of(options, run, row, History.load(run))
    command, action = plan(options.kind, target)
    if not options.yes:
        question = f"{action} (run {run.name}, job {target.job_id})"
        if not sys.stdin.isatty():
            raise UserError(f"no terminal to confirm in: add --yes to {question}")
        print(f"{question}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            raise UserError("nothing was done")
    before = History.load(run)
    pids = slurm.run(*command)
    if options.kind in _RANK_FAULTS and not pids.strip():
        raise TorchrelayError(f"rank {target.rank} does not run on {' '.join(target.nodes)}: nothing was done")
    found = _await(partial(_interruptions, run, before), run, f"run {run.name} has not resumed training")
    state = summaries([run])[0].state
    if options.json:
        cli.print_json(
            {"run": run.name, "drill": options.kind, "state": state, "interruptions": [asdict(one) for one in found]}
        )
    else:
        console = console_for()
        console.print(interruption_table(console, found))
    return 1 if state in {"failed", "cancelled"} else 0


def _await(look: Callable[[], T | None], run: RunDir, problem: str) -> T:
    """Return the result of `look` once there is one. Raises TorchrelayError, with the problem, after 15 minutes."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if (found := look()) is not None:
            return found
        time.sleep(_POLL_SECONDS)
    raise TorchrelayError(f"{problem} after {_TIMEOUT_SECONDS:.0f} s: see hpc status {run.name}")


def _with_ranks(run: RunDir) -> Summary | None:
    """Return the status of the run if all its ranks have started. Raises UserError if the run has ended."""
    row, last = summaries([run])[0], History.load(run).last_attempt
    if row.state in TERMINAL:
        raise UserError(f"run {run.name} has no ranks: its state is {row.state} (hpc status {run.name})")
    return row if row.state == "running" and last is not None and last.world_size else None


def target_of(options: DrillOptions, run: RunDir, row: Summary, history: History) -> DrillTarget:
    """Choose the target by the flags and the run's status. Raises UserError if it is not a part of the run."""
    attempt = history.attempts[-1]
    nodes, world_size = attempt.members, attempt.world_size or 0
    others = [node for node in nodes if node != attempt.nodes[0]]
    if options.node not in {None, *nodes}:
        raise UserError(f"--node is {options.node!r}: use one of {', '.join(nodes)}, where the run trains")
    rank = world_size - 1 if options.rank is None else options.rank
    if not 0 <= rank < world_size:
        raise UserError(f"--rank is {rank}: use 0 to {world_size - 1}")
    cluster = RunSpec.load(run).cluster
    own = running_slurm_conf()
    return DrillTarget(
        run=run,
        cluster=cluster,
        job_id=str(row.job_id),
        nodes=nodes,
        node=options.node or (others or nodes)[-1],
        rank=rank,
        testbed=cluster == "slurm" and own is not None and os.environ.get("SLURM_CONF") == str(own),
    )


# For each failure of one rank, the action of `hpc.cluster.drill_faults` and its description.
_RANK_FAULTS = {"worker-kill": ("kill", "kill rank {} with SIGKILL"), "hang": ("stop", "stop rank {} with SIGSTOP")}


def plan(kind: Kind, target: DrillTarget) -> tuple[list[str], str]:
    """Return the command that causes a failure, and a description. Raises UserError if a local run cannot have it."""
    if kind in _RANK_FAULTS:
        action, description = _RANK_FAULTS[kind]
        return on_nodes(target, target.nodes, action, str(target.rank)), description.format(target.rank)
    if target.cluster == "local":
        raise UserError(f"{kind} needs Slurm, and this run is on --cluster local: use worker-kill or hang")
    if kind == "node-kill" and target.testbed:
        return [sys.executable, "-m", "hpc", "testbed", "kill-node", target.node], f"cut the power of {target.node}"
    if kind == "node-kill":
        return on_nodes(target, [target.node], "kill-all"), f"kill all processes of the run on {target.node}"
    if not target.testbed:
        return ["scontrol", "requeue", target.job_id], "requeue the job"
    return [
        "sbatch", "--partition=urgent", "--exclusive", f"--nodes={len(target.nodes)}",
        f"--nodelist={','.join(target.nodes)}", "--job-name=drill", "--output=/dev/null", "--wrap=true",
    ], "preempt the job"  # fmt: skip


def on_nodes(target: DrillTarget, nodes: Sequence[str], *action: str) -> list[str]:
    """Return the command that runs `hpc.cluster.drill_faults`, from the run's copy of the code, on nodes of the run."""
    path = f"PYTHONPATH={own_pythonpath(target.run.packages)}"
    faults = ["env", path, sys.executable, "-P", "-m", "hpc.cluster.drill_faults", str(target.run.path), *action]
    if target.cluster == "local":
        return faults
    return [
        "srun", f"--jobid={target.job_id}", "--overlap", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}",
        "--ntasks-per-node=1", "--gres=none", "--cpu-bind=none", "--mpi=none", *faults,
    ]  # fmt: skip


def _interruptions(run: RunDir, before: History) -> list[Interruption] | None:
    """Return the run's interruptions since `before` if it trains again or has ended.

    A run trains again when all ranks have started and, if it reports steps, the first step is done.
    """
    history = History.load(run)
    new = interruptions_of(history)[len(interruptions_of(before)) :]
    reports_steps = history.knows_steps or bool(history.of(FirstStep))
    has_started = bool(new) and history.attempts[-1].world_size is not None
    trains = has_started and (not reports_steps or new[-1].seconds["first_step"] is not None)
    return new if trains or summaries([run])[0].state in TERMINAL else None


main = partial(cli.run, drill, DrillOptions, "drill")
