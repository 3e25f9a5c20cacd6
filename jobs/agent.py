"""The per-node process: claim or join an attempt, stage the data, take part in its rounds, see that the run goes on.

Runs on compute nodes, one task per node: `python -m jobs.agent RUN_DIR`. The head node's agent decides
(jobs.control.coordinator);
the others report to it and follow its orders; when it dies, one of them hands the run to a new job.
"""

import contextlib
import os
import secrets
import shutil
import sys
import threading
import time
from pathlib import Path

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from hpc.core import ledger
from hpc.core.attempts import Attempt, attempts_of
from hpc.core.errors import TorchrelayError
from hpc.core.files import refresh_nfs_cache
from hpc.core.nodedir import DEV_SHM, open_node_dir
from hpc.core.outcome import Cause, JobState
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from hpc.slurm import relaunch
from hpc.spec import RunSpec
from hpc.staging import StagingStopped
from jobs import claim
from jobs.context import AgentContext
from jobs.control.channel import ControlClient, ControlServer
from jobs.control.coordinator import Coordinator
from jobs.control.membership import NodeLimits
from jobs.control.messages import Directive, NodeStatus, Phase
from jobs.ending.conclusion import conclude
from jobs.ending.failover import save_snapshot, take_over
from jobs.log import log
from jobs.ranks.local_ranks import LocalRanks
from jobs.ranks.rendezvous import NodeAllocation, find_allocation, pick_port
from jobs.ranks.round import run_round
from jobs.ranks.torchrun import StopRequest
from jobs.staging.data import stage_data
from jobs.staging.unpack_environment import stage_environment

_POLL_SECONDS = 0.1
_WAIT_SECONDS = 0.5
_JOIN_SECONDS = 600.0
_ALIVE_SECONDS = 5.0
_MEET_SECONDS = 30.0
# KillWait, which an ending job may take to save, is seldom more than a minute.
_ENDING_SECONDS = 120.0
# A clock that is further off than this makes times in the ledger, and certificates, useless.
_MOST_SKEW_SECONDS = 5.0


def main(argv: list[str]) -> int:
    """Run one node's part of one attempt. Returns the exit code of the task."""
    run = RunDir(Path(argv[0]))
    stop = StopRequest()
    stop.install()
    place = find_allocation(os.environ)
    try:
        exit_code = _run_attempt(run, RunSpec.load(run), place, stop)
    except (TorchrelayError, OSError) as error:
        log(str(error))
        exit_code = 1
    # srun ends all agents when one fails; the head's has the last word. submitit restarts for one of any.
    return exit_code if place.is_head or exit_code == LOCAL_REQUEUE_RETURN_CODE else 0


def _run_attempt(run: RunDir, spec: RunSpec, place: NodeAllocation, stop: StopRequest) -> int:
    if run.final_result.exists():
        log(f"run {run.name} is complete: see {run.final_result}")
        return 0
    link, attempt = _lead(run, place) if place.is_head else _join(run, place, stop)
    if attempt is None or link is None:
        return 0
    memory, held = open_node_dir(run.path, place.node_rank if place.cluster == "local" else 0)
    try:
        node = AgentContext(
            run=run, spec=spec, place=place, stop=stop, attempt=attempt, memory=memory, link=link,
            writer=claim.event_file(run, attempt.attempt, place.node_rank),
            ranks=LocalRanks(memory, spec.resources.gpus_per_node, place.host),
            report=NodeStatus(node_rank=place.node_rank),
        )  # fmt: skip
        if place.is_head:
            threading.Thread(target=_keep_alive, args=(run,), daemon=True, name="alive").start()
        with node.held:
            exit_code = _take_part(node)
        if not node.unsaved:
            shutil.rmtree(memory.path, ignore_errors=True)
        return exit_code
    finally:
        os.close(held)


def _keep_alive(run: RunDir) -> None:
    """Give the supervisor a sign of life, for as long as this process runs; in a thread of its own."""
    while True:
        # A storage that is full, or away, is not this process's death.
        with contextlib.suppress(OSError):
            run.alive.touch()
        time.sleep(_ALIVE_SECONDS)


def _lead(run: RunDir, place: NodeAllocation) -> tuple[ControlServer, Attempt]:
    """Claim the next attempt, or tell the other nodes' agents why not."""
    nonce = secrets.token_hex(8)
    hub = ControlServer(nonce)
    try:
        return hub, _claim(run, place, hub.port, nonce)
    except (TorchrelayError, OSError) as error:
        claim.refuse(run, place, str(error))
        raise


def _claim(run: RunDir, place: NodeAllocation, port: int, nonce: str) -> Attempt:
    """Claim the next attempt, after making sure that no other job works on this run.

    Raises:
        TorchrelayError: another job does, or the run was cancelled.
    """
    refresh_nfs_cache(run.events)
    events = ledger.read(run.events)
    if any(event["event"] == "cancelled" for event in events):
        raise TorchrelayError(f"run {run.name} was cancelled: submit it under a new name")
    last = next(reversed(attempts_of(events)), None)
    if last is not None and last.ended is None:
        if last.job_id != place.job_id:
            _wait_for_the_end_of(last.job_id, run, place)
        cause, detail = _fate(last, place)
        heard = max(event["time"] for event in events if event.get("attempt") == last.attempt)
        step = relaunch.last_step(run) or (0 if RunSpec.load(run).train else None)
        relaunch.record_end(run, last.attempt, cause=cause, step=step, detail=detail, last_heard=heard)
    return claim.claim(run, place, port, nonce)


def _fate(last: Attempt, place: NodeAllocation) -> tuple[Cause, str]:
    """Why an attempt ended of which no agent could log it."""
    try:
        dead = slurm.dead_nodes(list(last.nodes)) if place.cluster == "slurm" else []
    except TorchrelayError as error:
        return Cause.LOST, f"it left no word, and Slurm does not answer ({error})"
    return (Cause.NODE_FAILURE, f"down: {', '.join(dead)}") if dead else (Cause.LOST, "it left no word")


def _wait_for_the_end_of(job_id: str, run: RunDir, place: NodeAllocation) -> None:
    """Let another job that is ending save its state.

    Raises:
        TorchrelayError: it runs, or does not end.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    while place.cluster == "slurm" and (job := slurm.jobs().get(job_id)) and job.state is not JobState.PENDING:
        if not job.state.alive and job.state is not JobState.UNKNOWN:
            return
        if job.state is JobState.RUNNING or time.monotonic() > deadline:
            raise TorchrelayError(f"run {run.name} is in the hands of job {job_id}: hpc cancel, or wait")
        time.sleep(_WAIT_SECONDS)


def _join(run: RunDir, place: NodeAllocation, stop: StopRequest) -> tuple[ControlClient | None, Attempt | None]:
    """Find the head node's agent; nothing if this one was told to stop first."""
    attempt = claim.join(run, place, lambda: bool(stop), _JOIN_SECONDS)
    if attempt is None:
        return None, None
    return ControlClient(place.head, attempt.port, attempt.nonce, NodeStatus(node_rank=place.node_rank)), attempt


def _take_part(node: AgentContext) -> int:
    """This node's part in the attempt. Returns the exit code."""
    captain = None
    if isinstance(node.link, ControlServer):
        limits = NodeLimits(least=node.spec.least_nodes, most=node.spec.resources.max_nodes)
        captain = Coordinator(node, node.link, limits)
        node.duties.append(captain.tick)
    data, able = _prepare(node)
    while able and (orders := _next_orders(node)):
        node.tell(phase=Phase.RUNNING, round=orders.round)
        try:
            exit_code = run_round(node, orders, data, threads_per_rank(node.place, node.spec.resources.gpus_per_node))
        except (TorchrelayError, OSError) as error:
            _fail(node, error)
            break
        phase = Phase.READY if exit_code is None else Phase.ENDED
        node.tell(phase=phase, exit_code=exit_code or 0, port=pick_port())
    return _leave(node, captain)


def _fail(node: AgentContext, error: Exception) -> None:
    """This node cannot take part any more, and says why."""
    node.note("node_failed", node=node.place.host, detail=str(error))
    log(str(error))
    node.tell(phase=Phase.FAILED, detail=str(error))


def _leave(node: AgentContext, captain: Coordinator | None) -> int:
    """End this node's part: for the head node's agent, that of all."""
    if node.head_is_lost and not node.orders.over:
        return take_over(node)
    if isinstance(node.link, ControlServer) and captain is not None:
        while not node.orders.over:
            node.turn()
            time.sleep(_POLL_SECONDS)
        node.tell(phase=Phase.LEFT)
        return conclude(node, node.link, captain)
    if node.orders.members[:1] == (node.place.node_rank,) and not node.run.final_result.exists():
        save_snapshot(node)  # the head node has none
    node.tell(phase=node.report.phase if node.report.phase is Phase.FAILED else Phase.LEFT, beats=())
    node.link.close()
    return 0


def _prepare(node: AgentContext) -> tuple[Path | None, bool]:
    """Make this node ready: where the data are, and whether it can take part."""
    try:
        threads_per_rank(node.place, node.spec.resources.gpus_per_node)
        _introduce(node)
        data = stage_data(node)
        stage_environment(node)
    except StagingStopped:
        return None, False
    except (TorchrelayError, OSError) as error:
        _fail(node, error)
        return None, False
    node.tell(phase=Phase.READY, port=pick_port())
    return data, True


def _introduce(node: AgentContext) -> None:
    """Say that this node is there, and what it has."""
    skew = node.link.meet(_MEET_SECONDS) if isinstance(node.link, ControlClient) else 0.0
    if skew is None:
        raise TorchrelayError(
            f"{node.place.host} cannot reach the agent on {node.place.head}, port {node.attempt.port}: is there a "
            "firewall between the nodes, or does the name mean another address here?"
        )
    node.note(
        "joined", node=node.place.host, node_rank=node.place.node_rank,
        clock_skew_seconds=round(skew, 3),
        tmp_free_bytes=shutil.disk_usage(node.spec.stage_dir).free,
        shm_free_bytes=shutil.disk_usage(DEV_SHM).free if DEV_SHM.exists() else 0,
    )  # fmt: skip
    if abs(skew) > _MOST_SKEW_SECONDS:
        log(f"the clock of {node.place.host} is {-skew:+.1f} s off that of {node.place.head}")


def threads_per_rank(place: NodeAllocation, ranks: int) -> int:
    """Threads for each rank, so that all ranks of the machine together do not oversubscribe its cores.

    Raises:
        TorchrelayError: this process may use fewer cores than the job was given.
    """
    usable, machine = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if place.cpus is not None and usable < min(place.cpus, machine):
        raise TorchrelayError(
            f"{place.host} lets the job use {usable} of the {place.cpus} CPUs it asked for: a CPU binding leaked into "
            "it; type `unset SLURM_CPU_BIND` before sbatch, or submit with hpc submit"
        )
    # Without binding, a process may use the cores of other jobs as well.
    usable = min(usable, place.cpus or usable)
    sharing = ranks * (place.num_nodes if place.cluster == "local" else 1)
    return max(1, usable // sharing)


def _next_orders(node: AgentContext) -> Directive | None:
    """Wait for a round that needs this node; None when there will be none."""
    while not (node.orders.over or node.stop or node.head_is_lost):
        node.turn()
        if node.orders.round > node.report.round and node.place.node_rank in node.orders.members:
            return node.orders
        time.sleep(_POLL_SECONDS)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
