"""The per-node process: claim or join an attempt, stage the data, run torchrun, say how it ended, requeue.

Runs on compute nodes, one task per node: `python -m jobs.agent RUN_DIR`. The head node's agent decides; the others
follow what it writes into the ledger.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpc import ledger, slurm, staging
from hpc.attempts import Attempt, attempts_of
from hpc.errors import TorchrelayError
from hpc.outcome import Cause
from hpc.rundir import RunDir
from hpc.slurm import JobState
from hpc.spec import RunSpec
from hpc.staging import StagingStopped
from hpc.units import stop_lead_seconds, walltime_minutes
from jobs import claim, script, torchrun, train
from jobs.conclusion import conclude, last_step
from jobs.node import Node
from jobs.rendezvous import (
    Place,
    Rendezvous,
    find_place,
    interface_of,
    is_free,
    local_address,
    pick_port,
    program_argv,
    torchrun_argv,
)
from jobs.torchrun import StopRequest, Watch

_POLL_SECONDS = 0.5
_JOIN_SECONDS = 600.0
# KillWait, which an ending job may take to save, is seldom more than a minute.
_ENDING_SECONDS = 120.0
_FOLLOW_SECONDS = 60.0
_MOST_ROUNDS = 5
# What is left of the warning time when the ranks are given up: for the requeue itself.
_REQUEUE_SECONDS = 10


def main(argv: list[str]) -> int:
    """Run one node's part of one attempt. Returns the exit code of the task."""
    run = RunDir(Path(argv[0]))
    stop = StopRequest()
    stop.install()
    place = find_place(os.environ)
    try:
        exit_code = _run_attempt(run, RunSpec.load(run), place, stop)
    except (TorchrelayError, OSError) as error:
        print(f"torchrelay: {error}", flush=True)
        exit_code = 1
    # srun ends all agents when one fails. The head's has the last word; one that is killed has no say in it.
    return exit_code if place.is_head else 0


def _run_attempt(run: RunDir, spec: RunSpec, place: Place, stop: StopRequest) -> int:
    if run.final_result.exists():
        print(f"torchrelay: run {run.name} is complete: see {run.final_result}", flush=True)
        return 0
    if place.is_head:
        attempt: Attempt | None = _claim_or_refuse(run, place)
    else:
        attempt = claim.join(run, place, lambda: bool(stop), _JOIN_SECONDS)
    if attempt is None:
        return 0
    writer = claim.event_file(run, attempt.attempt, place.node_rank)
    node = Node(run=run, spec=spec, place=place, stop=stop, attempt=attempt, writer=writer)
    writer.append("joined", attempt=attempt.attempt, node=place.host)
    exit_code, detail = _work(node)
    node.note("left", node_rank=place.node_rank, exit_code=exit_code)
    return conclude(node, exit_code, detail) if place.is_head else exit_code


def _claim_or_refuse(run: RunDir, place: Place) -> Attempt:
    try:
        return _claim(run, place)
    except (TorchrelayError, OSError) as error:
        claim.refuse(run, place, str(error))
        raise


def _claim(run: RunDir, place: Place) -> Attempt:
    """Claim the next attempt, after making sure that no other job works on this run.

    Raises:
        TorchrelayError: another job does, or the run was cancelled.
    """
    events = ledger.read(run.events)
    if any(event["event"] == "cancelled" for event in events):
        raise TorchrelayError(f"run {run.name} was cancelled: submit it under a new name")
    last = next(reversed(attempts_of(events)), None)
    if last is None or last.ended is not None:
        return claim.claim(run, place)
    if last.job_id != place.job_id:
        _wait_for_the_end_of(last.job_id, run, place)
    cause, detail = _fate(last, place)
    attempt = claim.claim(run, place)
    claim.event_file(run, attempt.attempt, place.node_rank).append(
        "attempt_ended", attempt=last.attempt, cause=cause, step=last_step(run), detail=detail,
        last_heard=max(event["time"] for event in events if event.get("attempt") == last.attempt),
    )  # fmt: skip
    return attempt


def _fate(last: Attempt, place: Place) -> tuple[Cause, str]:
    """Why an attempt ended whose head node's agent could not say it."""
    try:
        dead = slurm.dead_nodes(list(last.nodes)) if place.cluster == "slurm" else []
    except TorchrelayError as error:
        return Cause.LOST, f"it left no word, and Slurm does not answer ({error})"
    return (Cause.NODE_FAILURE, f"down: {', '.join(dead)}") if dead else (Cause.LOST, "it left no word")


def _wait_for_the_end_of(job_id: str, run: RunDir, place: Place) -> None:
    """Let another job that is ending save its state.

    Raises:
        TorchrelayError: it runs, or does not end.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    while place.cluster == "slurm" and (job := slurm.jobs().get(job_id)) and job.state is not JobState.PENDING:
        if not job.state.alive:
            return
        if job.state is JobState.RUNNING or time.monotonic() > deadline:
            raise TorchrelayError(f"run {run.name} is in the hands of job {job_id}: hpc cancel, or wait")
        time.sleep(_POLL_SECONDS)


def _work(node: Node) -> tuple[int, str | None]:
    """Stage and train; the exit code of torchrun, and what to tell people if it never ran."""
    try:
        threads = threads_per_rank(node.place, node.spec.resources.gpus_per_node)
        data = _stage(node)
        return _train(node, data, threads), None
    except StagingStopped:
        return 1, None
    except (TorchrelayError, OSError) as error:
        node.writer.append("node_failed", attempt=node.attempt.attempt, node=node.place.host, detail=str(error))
        print(f"torchrelay: {error}", flush=True)
        return 1, f"{node.place.host}: {error}"


def threads_per_rank(place: Place, ranks: int) -> int:
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
    sharing = ranks * (place.num_nodes if place.cluster == "local" else 1)
    return max(1, usable // sharing)


def _stage(node: Node) -> Path | None:
    source = node.spec.data
    if source is None:
        return None
    staged = staging.stage(Path(source), Path(node.spec.stage_dir), lambda: bool(node.stop))
    node.writer.append(
        "staged", attempt=node.attempt.attempt, node=node.place.host, seconds=round(staged.seconds, 3),
        path=str(staged.path), reused=staged.reused, in_place=staged.in_place,
    )  # fmt: skip
    if staged.in_place:
        print(f"torchrelay: reading {source} in place: {staged.in_place}", flush=True)
    return staged.path


def _train(node: Node, data: Path | None, threads: int) -> int:
    """Run torchrun, in as many rendezvous as it takes to find a port that nobody else takes first."""
    exit_code, done_round = 0, 0
    while not node.stop and done_round < _MOST_ROUNDS:
        rendezvous = _announce(node, done_round + 1) if node.place.is_head else _follow(node, done_round)
        if rendezvous is None:
            break
        done_round = rendezvous.round
        exit_code = _run_torchrun(node, rendezvous, data, threads)
        if exit_code == 0 or (node.place.is_head and is_free(rendezvous.port)):
            break
    return exit_code


def _announce(node: Node, number: int) -> Rendezvous:
    """Choose a port and tell the other nodes."""
    port = pick_port()
    node.writer.append("rendezvous", attempt=node.attempt.attempt, round=number, port=port)
    return _rendezvous(node, number, port)


def _follow(node: Node, done_round: int) -> Rendezvous | None:
    """Wait for the head node's next rendezvous: the first one for as long as staging takes there.

    None when there will be none: the attempt has ended, or the head says nothing any more.
    """
    deadline = time.monotonic() + _FOLLOW_SECONDS
    while not node.stop and not any(event["node_rank"] == 0 for event in node.events("left")):
        announced = [event for event in node.events("rendezvous") if event["round"] > done_round]
        if announced:
            return _rendezvous(node, announced[-1]["round"], announced[-1]["port"])
        if done_round and time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return None


def _rendezvous(node: Node, number: int, port: int) -> Rendezvous:
    return Rendezvous(
        run=node.run.name, attempt=node.attempt.attempt, nonce=node.attempt.nonce, round=number,
        host=node.place.head, port=port,
    )  # fmt: skip


def _run_torchrun(node: Node, rendezvous: Rendezvous, data: Path | None, threads: int) -> int:
    spec, run, attempt = node.spec, node.run, node.attempt.attempt
    logs = run.attempt_logs(attempt)
    logs.mkdir(parents=True, exist_ok=True)
    address = local_address(node.place)
    environment = rank_environment(os.environ, node.place, spec.resources.gpus_per_node, address, threads)
    if spec.train is not None and data is not None:
        program = train.command(spec.train, run, attempt, data)
    else:
        program = script.command(spec.script, run)
        environment = script.environment(environment, run, attempt, data)
    wrapper = [sys.executable, "-S", str(Path(__file__).with_name("rank.py")), str(logs)]
    argv = torchrun_argv(rendezvous, node.place, spec.resources.gpus_per_node, address, sys.executable)
    lead = stop_lead_seconds(walltime_minutes(spec.resources.time or "1d"))

    def superseded() -> bool:
        return bool(node.events("node_failed")) or node.newest_round() > rendezvous.round

    watch = Watch(stop=node.stop, patience_seconds=lead - _REQUEUE_SECONDS, superseded=superseded)
    return torchrun.run([*argv, *program_argv([*wrapper, *program])], environment, run.code, watch)


def rank_environment(base: Mapping[str, str], place: Place, ranks: int, address: str, threads: int) -> dict[str, str]:
    """What the ranks of this node find in their environment beside torchrun's own variables."""
    changes = {"OMP_NUM_THREADS": str(threads)}
    # gloo publishes the address that this node's own name resolves to, and on many systems that is 127.0.1.1.
    interface = interface_of(address)
    if interface:
        changes["GLOO_SOCKET_IFNAME"] = interface
    visible = base.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if place.cluster == "local" and len(visible) == ranks * place.num_nodes:
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(visible[place.node_rank * ranks : (place.node_rank + 1) * ranks])
    return {**base, **changes}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
