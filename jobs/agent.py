"""The node agent: claims or joins an attempt, stages the data, takes part in the rounds, and continues the run.

Runs on compute nodes, one task per node: `python -m jobs.agent RUN_DIR`. The first node's agent coordinates the attempt
(jobs.control.coordinator); the other agents report to it and follow its directive. If the first node is lost, another
agent continues the run (jobs.ending).
"""

import os
import secrets
import sys
import time
import traceback
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from hpc.base.errors import EXIT_NO_SPACE, BadNodeError, TorchrelayError, UserError
from hpc.base.files import DISK_FULL, TEMPORARY
from hpc.base.kernel import interface_addresses, name_process, raise_open_files_limit
from hpc.base.transport import pick_port
from hpc.run.causes import EXIT_CODES, Cause
from hpc.run.events.kinds import Joined, NodeFailed
from hpc.run.nodedir import HeldNodeDir
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from jobs import claim
from jobs.control.channel import ControlChannel, ControlClient, ControlServer, first_node_hosts, own_addresses
from jobs.control.coordinator import Coordinator
from jobs.control.messages import OVER, Directive, NodeStatus, Phase
from jobs.ending import (
    await_loss_of_first_node,
    conclude,
    conclude_failed_agent,
    replace_job_without_first_node,
    save_snapshot,
    take_over,
)
from jobs.node_attempt import (
    NodeAllocation,
    NodeAttempt,
    await_storage,
    find_allocation,
    load_own_spec,
    log,
    send_heartbeats,
)
from jobs.ranks.health_check import check_health
from jobs.ranks.monitor import NodeMonitor
from jobs.ranks.rank_environment import RankSetup
from jobs.ranks.round import prepare_round, run_round
from jobs.ranks.torchrun import Standby
from jobs.senders import sending
from jobs.staging.copy_progress import StagingStopped
from jobs.staging.node_staging import NodeStaging
from jobs.staging.unpack_environment import stage_environment
from jobs.stop_request import StopRequest

_POLL_SECONDS = 0.1
_JOIN_SECONDS = 600.0
# A node tries all names and addresses of the first node: each may take 2 s, or more if a name server does not answer.
_MEET_SECONDS = 60.0


def main(argv: list[str]) -> int:
    """Run one node's part of one attempt, and return the exit code of the task."""
    run = RunDir(Path(argv[0]))
    stop = StopRequest()
    stop.install()
    # Shells and systemd allow 1,024 open files by default; the first node's agent has a connection to every other node.
    raise_open_files_limit()
    allocation = find_allocation(os.environ)
    # hpc.cluster.drill_faults finds the agent by the first two words.
    name_process("agent", ["jobs.agent", argv[0]], f"node {allocation.node_rank}/{allocation.num_nodes}")
    try:
        spec = await_storage(run, stop.__bool__, partial(load_own_spec, run))
        exit_code = _run_attempt(run, spec, allocation, stop)
    except Exception as error:  # noqa: BLE001 - the last resort
        log(_describe(error))
        exit_code = EXIT_NO_SPACE if isinstance(error, OSError) and error.errno in DISK_FULL else 1
    # On Slurm, only the first node's exit code may fail the job: srun exits with the highest exit code of its tasks.
    # With --cluster local, submitit requeues if any task exits with LOCAL_REQUEUE_RETURN_CODE.
    return exit_code if allocation.is_first or exit_code == LOCAL_REQUEUE_RETURN_CODE else 0


def _run_attempt(run: RunDir, spec: RunSpec, allocation: NodeAllocation, stop: StopRequest) -> int:
    on_storage = partial(await_storage, run, stop.__bool__)
    if on_storage(partial(claim.refuse_if_complete, run, allocation)):
        return 0
    channel: ControlChannel
    if allocation.is_first:
        if on_storage(partial(claim.must_wait, run, spec, allocation)):
            return 0
        secret = secrets.token_hex(16)
        channel = ControlServer(
            secret, allocation.num_nodes, spec.network.ports, timeout_seconds=spec.stage_timeout.seconds
        )
        try:
            addresses = own_addresses(spec.network.interface) if allocation.cluster == "slurm" else []
            once = spec.recovery.start_once
            take = partial(claim.claim_next, run, allocation, channel.port, secret, addresses, start_once=once)
            attempt = on_storage(take)
        except Exception as error:
            if not isinstance(error, OSError) or error.errno not in TEMPORARY:
                on_storage(partial(claim.refuse, run, allocation, str(error)))
            raise
        send_heartbeats(run)
    else:
        try:
            joined = claim.join(run, allocation, lambda: bool(stop), _JOIN_SECONDS)
        except claim.FirstNodeLostError as error:
            return replace_job_without_first_node(run, spec, allocation, str(error))
        if joined is None:
            return 0
        attempt, status = joined, NodeStatus(node_rank=allocation.node_rank)
        hosts = first_node_hosts(allocation.first_node, attempt.addresses, spec.network.interface)
        channel = ControlClient(hosts, attempt.port, attempt.secret, status, timeout_seconds=spec.stage_timeout.seconds)
    node = NodeAttempt(run=run, spec=spec, allocation=allocation, attempt=attempt)
    try:
        return _take_part(node, channel, stop)
    except Exception as error:  # noqa: BLE001 - whatever it is, the attempt must not stay claimed for ever
        return _fail(node, channel, stop, error)
    finally:
        node.storage.finish()


def _check_interface(node: NodeAttempt) -> None:
    """Raise BadNodeError if this node has no address on the network interface of --interface."""
    interface = node.spec.network.interface
    if interface and node.on_slurm and not own_addresses(interface):
        raise BadNodeError(
            f"--interface is {interface}, but {node.host} has no such network interface with an address: it has "
            f"{', '.join(interface_addresses())}"
        )


def _take_part(node: NodeAttempt, channel: ControlChannel, stop: StopRequest) -> int:
    # With --cluster local all agents run on this machine, so each needs its own directory.
    held = HeldNodeDir(node.run.path, 0 if node.on_slurm else node.allocation.node_rank)
    if held.problem:
        log(f"snapshots go to {held.files.path}: {held.problem}")
    finished = False
    try:
        with ExitStack() as resources:
            exit_code = _Agent(node, held, channel, stop, resources).run()
        finished = True
        return exit_code
    finally:
        held.close(remove=finished and not node.has_unsaved_snapshot.is_set())


def _is_defect(error: Exception) -> bool:
    """Return whether an error is a defect of torchrelay: it would also occur on other nodes."""
    return not isinstance(error, TorchrelayError | OSError)


def _cause_of(error: TorchrelayError | OSError) -> Cause:
    """Return the cause of an agent's failure. Storage that fails now may work in the next attempt."""
    if isinstance(error, OSError) or (isinstance(error, UserError) and isinstance(error.__cause__, OSError)):
        return Cause.CRASHED
    return EXIT_CODES.get(error.exit_code, Cause.CRASHED)


def _describe(error: Exception) -> str:
    """Describe an error in one line for people, and print the traceback of a defect."""
    if not _is_defect(error):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def _fail(node: NodeAttempt, channel: ControlChannel, stop: StopRequest, error: Exception) -> int:
    """End this node's part in the attempt after an error; on the first node, end the attempt. Returns the exit code."""
    phase, cause = (Phase.FAILED, Cause.CRASHED) if _is_defect(error) else (Phase.BAD_NODE, Cause.BAD_NODE)
    detail = _describe(error)
    log(detail)
    channel.report(phase=phase, detail=detail)
    node.record(NodeFailed(node=node.host, cause=cause, detail=detail))
    if isinstance(channel, ControlServer):
        channel.directive = replace(channel.directive, over=True)
        return conclude_failed_agent(node, cause, detail, stop.name)
    channel.close()
    return 0


class _Agent:
    """One node's part in an attempt, from the staging to the end of the attempt."""

    def __init__(
        self, node: NodeAttempt, held: HeldNodeDir, channel: ControlChannel, stop: StopRequest, resources: ExitStack
    ) -> None:
        self._node, self._channel, self._stop = node, channel, stop
        self._monitor = NodeMonitor(node, held, channel, stop)
        self._monitor.callbacks.append(channel.check)
        self._staging = NodeStaging(node, channel, self._monitor, resources)
        self._standby = resources.enter_context(closing(Standby()))

    def run(self) -> int:
        """Run this node's part of the attempt, and return the exit code of the task."""
        if not isinstance(self._channel, ControlServer):
            self._train()
            return self._leave(self._channel)
        with sending(self._node):
            coordinator = Coordinator(self._node, self._channel, self._stop)
            self._monitor.callbacks.append(coordinator.poll)
            self._train()
            while not self._channel.directive.over:
                self._monitor.poll()
                time.sleep(_POLL_SECONDS)
            self._channel.report(phase=Phase.LEFT)
            self._node.storage.finish()
            return conclude(self._node, self._channel, self._monitor, coordinator)

    def _train(self) -> None:
        """Stage the data, then take part in each round that includes this node. Report errors, but raise defects."""
        try:
            python, environment = self._node.spec.python or sys.executable, self._node.spec.stage_env
            setup = RankSetup(data=None, python=python, standby=self._standby)
            if environment is None:
                prepare_round(self._node, self._monitor, setup)
            self._record_joined()
            setup = replace(setup, data=self._staging.stage_data())
            if environment is not None:
                setup = replace(setup, python=stage_environment(self._staging, Path(environment)))
                prepare_round(self._node, self._monitor, setup)
            ports = self._node.spec.network.ports
            check_health(self._node, self._monitor)
            self._channel.report(phase=Phase.READY, port=pick_port(ports))
            while directive := self._next_round():
                self._channel.report(phase=Phase.RUNNING, round=directive.round, exit_code=0)
                exit_code = run_round(self._node, self._channel, self._monitor, self._stop, directive, setup)
                if exit_code != 0:
                    check_health(self._node, self._monitor)
                phase = Phase.READY if exit_code is None else Phase.ENDED
                self._channel.report(phase=phase, exit_code=exit_code or 0, port=pick_port(ports))
        except StagingStopped:
            return
        except (TorchrelayError, OSError) as error:
            # Report before recording: if a mount hangs, the run directory may be on it, too.
            cause = _cause_of(error)
            phase = Phase.BAD_NODE if cause is Cause.BAD_NODE else Phase.FAILED
            self._channel.report(phase=phase, cause=cause, detail=str(error))
            self._node.record(NodeFailed(node=self._node.host, cause=cause, detail=str(error)))
            log(str(error))

    def _record_joined(self) -> None:
        """Wait until the first node's agent answers, and record that this node has joined."""
        node, channel, allocation = self._node, self._channel, self._node.allocation
        _check_interface(node)
        if isinstance(channel, ControlClient) and not channel.met.wait(_MEET_SECONDS):
            channel.check()
            tried = ", ".join(channel.hosts)
            raise TorchrelayError(
                f"{node.host} cannot reach the agent on {allocation.first_node}, port {node.attempt.port}, at {tried}: "
                "is there a firewall between the nodes (--port-range), or must they use another network (--interface)?"
            )
        node.record(Joined(node=node.host, node_rank=allocation.node_rank))

    def _next_round(self) -> Directive | None:
        """Wait for a round that includes this node; return its directive, or None if this node must leave."""
        while not self._monitor.must_leave:
            self._monitor.poll()
            directive = self._channel.directive
            if directive.round > self._channel.status.round and self._node.allocation.node_rank in directive.members:
                return directive
            time.sleep(_POLL_SECONDS)
        return None

    def _leave(self, channel: ControlClient) -> int:
        """End this node's part in the attempt, or take over if the first node is lost. Returns the exit code."""
        is_lost = channel.first_node_is_silent and not channel.directive.over
        if is_lost or (not channel.met.is_set() and not self._stop and await_loss_of_first_node(self._node)):
            return take_over(self._node, channel, self._monitor)
        if channel.directive.saver == self._node.allocation.node_rank and not self._node.run.final_result.exists():
            # The first node may have taken no part in the rounds, and then has no snapshot.
            save_snapshot(self._node, self._monitor.node_dir)
        phase = channel.status.phase
        channel.report(phase=phase if phase in OVER else Phase.LEFT, heartbeats=())
        # If the first node dies before its agent has saved a snapshot and recorded the end, this agent does both.
        while (channel.directive.over or (self._stop and channel.met.is_set())) and not channel.first_node_has_ended:
            if channel.first_node_is_silent:
                return take_over(self._node, channel, self._monitor)
            time.sleep(_POLL_SECONDS)
        channel.close()
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
