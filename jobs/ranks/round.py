"""Runs one round on one node: torchrun and its ranks, until they end or the directive changes.

Runs on compute nodes. On SIGUSR2 or SIGTERM the program of the ranks should save and exit with 0.
"""

import contextlib
import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torchrelay.node_memory import available_memory_bytes

from hpc.base import container
from hpc.base.errors import TorchrelayError
from hpc.base.files import make_below
from hpc.run.code_files import CodeFiles
from hpc.run.events import ledger
from hpc.run.events.history import History
from hpc.run.events.kinds import Checked
from hpc.run.nodedir import NodeDir
from hpc.run.spec import RunSpec
from hpc.run.spec_file import Program
from jobs.control.channel import ALONE, ControlChannel
from jobs.control.messages import Directive
from jobs.node_attempt import NodeAttempt, log
from jobs.ranks.monitor import NodeMonitor
from jobs.ranks.rank_environment import RankSetup, round_environment, torchrun_environment
from jobs.ranks.rank_program import TopLevel, program_argv
from jobs.ranks.torchrun import MAX_RESTARTS, PROCESS_WRAPPER, Rendezvous, Torchrun, torchrun_argv
from jobs.stop_request import StopRequest

_POLL_SECONDS = 0.1
# By then, the imports of the next torchrun do not delay most starts of ranks.
_SETTLED_SECONDS = 10.0
# Several times the memory of a torchrun that waits, and how often the available memory is compared with it.
_STANDBY_BYTES, _MEMORY_SECONDS = 2 * 2**30, 1.0
# A torchrun that has had no ranks for this long after a stop request only waits for nodes that will not come.
_WITHOUT_RANKS_SECONDS = 5.0
# How long to wait for killed ranks at the end of the attempt, when no other ranks will need their GPUs.
_LEAVE_SECONDS = 5.0
# A start that fails is retried for this long: stale NFS handles recover within seconds.
_START_SECONDS, _START_PAUSE_SECONDS = 30.0, 1.0


def prepare_round(node: NodeAttempt, monitor: NodeMonitor, setup: RankSetup, *, is_checked: bool = False) -> None:
    """Start the torchrun of this node's next round, which does its imports and waits for `run_round`.

    `is_checked` says that the nodes have passed the preflight, or will have passed it before that round.
    """
    if node.spec.container is not None:
        return
    with contextlib.suppress(OSError):  # run_round tries again
        preflight = not is_checked and _must_check(node)
        directive = Directive(members=(node.allocation.node_rank,), host=ALONE, preflight=preflight)
        argv, environment = _command(node, directive, setup, monitor.node_dir, ALONE)
        setup.standby.prepare(argv, environment, node.spec.start_directory(node.run))


def _must_check(node: NodeAttempt) -> bool:
    """Return whether the first round is probably the preflight: the run has one, and a node has not passed it yet."""
    if node.spec.program.preflight is None:
        return False
    checked = History(ledger.read_without_other_nodes(node.run.events)).of(Checked)
    return not {name for event in checked for name in event.nodes}.issuperset(node.allocation.hostnames)


class _NextTorchrun:
    """Starts the torchrun of the next round during a round, so that the next round does not wait for its imports.

    After a preflight, the next round is certain. Otherwise, it is possible if the job can go on without a node: that
    torchrun waits as long as this round lasts.
    """

    def __init__(
        self, node: NodeAttempt, monitor: NodeMonitor, stop: StopRequest, directive: Directive, setup: RankSetup
    ) -> None:
        self._node, self._monitor, self._stop, self._setup = node, monitor, stop, setup
        self._is_certain = directive.preflight
        may_lose_nodes = node.allocation.num_nodes > node.spec.fewest_to_continue and not node.attempt.start_once
        self._is_due = self._is_certain or may_lose_nodes
        self._next = time.monotonic() + (0.0 if self._is_certain else _SETTLED_SECONDS)

    def poll(self) -> None:
        """Start the torchrun when it is due and the node has the memory."""
        if self._stop or time.monotonic() < self._next or not self._is_due:
            return
        self._next = time.monotonic() + _MEMORY_SECONDS
        with contextlib.suppress(OSError):
            if self._is_certain or available_memory_bytes() > _STANDBY_BYTES:
                self._is_due = False
                prepare_round(self._node, self._monitor, self._setup, is_checked=True)


def run_round(
    node: NodeAttempt, channel: ControlChannel, monitor: NodeMonitor, stop: StopRequest, directive: Directive,
    setup: RankSetup,
) -> int | None:  # fmt: skip
    """Take part in a round. Returns torchrun's exit code, 1 if a stop request killed it, None if this node left."""
    program = _program(node, directive)
    monitor.begin_round(directive.round, program.exit_codes)
    started = _start(node, channel, monitor, directive, setup)
    if started is None:
        return None
    abort_count = directive.abort_count
    timeouts = dict[bool, float]()
    with ExitStack() as stack:
        stack.callback(monitor.ranks.end)
        torchrun = stack.enter_context(started)
        next_torchrun = _NextTorchrun(node, monitor, stop, directive, setup)
        ranks_seen = time.monotonic()
        while torchrun.exit_code is None:
            next_torchrun.poll()
            monitor.poll()
            torchrun.kill_stuck_forks()
            now = channel.directive
            # Abort first: people want the stacks of hanging ranks even if the attempt then ends.
            if now.abort_count > abort_count:
                abort_count = now.abort_count
                torchrun.abort_ranks()
            if now.over or now.paused or now.round != directive.round or channel.first_node_is_silent:
                if now.over:
                    torchrun.kill(_LEAVE_SECONDS)
                return None
            if stop.signal:
                if not program.exit_codes:
                    monitor.node_dir.stopping.touch()
                torchrun.forward(stop_signals(node.spec, stop.signal))
                ranks_seen = time.monotonic() if torchrun.ranks() else ranks_seen
                if stop.is_last not in timeouts:
                    read = partial(ledger.read_without_other_nodes, node.run.events)
                    history = History(node.storage.ask(read, otherwise=[]))
                    timeouts[stop.is_last] = stop.save_timeout_seconds(node.spec, history)
                without_ranks = min(time.monotonic() - ranks_seen, stop.seconds)
                if without_ranks > _WITHOUT_RANKS_SECONDS or stop.seconds > timeouts[stop.is_last]:
                    torchrun.kill(_LEAVE_SECONDS)
                    return 1
            time.sleep(_POLL_SECONDS)
        # The coordinator must know how the ranks ended before it learns that torchrun has ended.
        monitor.poll(now=True)
        return torchrun.exit_code


def stop_signals(spec: RunSpec, received: signal.Signals) -> list[signal.Signals]:
    """Return the signals that ask a rank to save and exit, in order: a rank gets the first one that it handles."""
    if spec.stop_signal:
        return [signal.Signals[spec.stop_signal]]
    # After Ctrl-C, a rank must save as after the other signals: SIGINT would raise KeyboardInterrupt in a Python rank.
    first = signal.SIGTERM if received is signal.SIGINT else received
    return list(dict.fromkeys((first, signal.SIGTERM, signal.SIGUSR2)))


def _program(node: NodeAttempt, directive: Directive) -> Program:
    program = node.spec.program
    return program.preflight if directive.preflight and program.preflight else program


def _start(
    node: NodeAttempt, channel: ControlChannel, monitor: NodeMonitor, directive: Directive, setup: RankSetup
) -> Torchrun | None:
    """Start torchrun. Returns None if the round ended before. Raises OSError if the start fails for half a minute."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            argv, environment = _command(node, directive, setup, monitor.node_dir, channel.own_address)
            directory = node.spec.start_directory(node.run)
            torchrun = setup.standby.take(argv, environment) or Torchrun(
                argv, environment, directory, contained=node.spec.container is not None
            )
        except OSError as error:
            if time.monotonic() > deadline:
                raise
            log(f"round {directive.round} cannot start on {node.host} yet, trying again: {error}")
        else:
            return torchrun
        monitor.poll()
        if monitor.must_leave or channel.directive.round != directive.round:
            return None
        time.sleep(_START_PAUSE_SECONDS)


def _command(
    node: NodeAttempt, directive: Directive, setup: RankSetup, node_dir: NodeDir, address: str
) -> tuple[list[str], dict[str, str]]:
    """Return torchrun's command line and environment. Raises OSError if this node cannot run the interpreter."""
    spec, run, number, allocation = node.spec, node.run, node.attempt.attempt, node.allocation
    logs, resources, python = run.attempt_logs(number), spec.resources, setup.python
    make_below(run.path, logs)
    if spec.container is None and not os.access(python, os.X_OK):
        raise FileNotFoundError(f"{node.host} cannot run {python}, the interpreter of the ranks")
    rendezvous = Rendezvous(
        run=run.name, attempt=number, secret=node.attempt.secret, round=directive.round,
        num_nodes=len(directive.members), host=directive.host, port=directive.port,
        node=directive.members.index(allocation.node_rank), ports=spec.network.ports,
    )  # fmt: skip
    program, code = _program(node, directive), spec.code_directory(run)
    first = [entry.format(code=code, packages=run.packages) for entry in program.import_path]
    wrapper = [str(PROCESS_WRAPPER), "rank", str(logs), str(node_dir.path)]
    places = {
        "run_dir": run.path, "attempt": number, "torchrelay_node_dir": node_dir.path,
        **({"data": setup.data} if setup.data else {}),
    }  # fmt: skip
    words, preload = program_argv(program, spec.start_directory(run), places), program.preload
    if program.isolated:
        words, top_level = ["script", *words], TopLevel.read(program, spec.start_directory(run), first)
        preload += top_level.imports
        if top_level.prepares_imports:
            wrapper, preload = [python, "-S", *wrapper, python, "-P", str(PROCESS_WRAPPER), "own"], ()
    words, restarts = [*wrapper, *words], 0 if spec.recovery.start_once else MAX_RESTARTS
    argv = torchrun_argv(rendezvous, resources.ranks_per_node, address, python, words, restarts)
    if spec.container is not None:
        # The mount of the run's directory also holds our own code, and links to the user's directory.
        files = CodeFiles.load(run.code)
        user = [code] if spec.in_place else [Path(files.root)] if files else []
        mounts = [run.path, *user, node_dir.path, *([setup.data] if setup.data else [])]
        # The wrapper runs again in the container: torchrun must end with it, and must ignore Slurm's signals.
        wrapped = [python, "-S", str(PROCESS_WRAPPER), "torchrun", *argv]
        argv = _in_container(node, Path(spec.container), wrapped, mounts)
    environment = round_environment(node, directive, setup, node_dir, address, first)
    return argv, torchrun_environment(rendezvous, environment, preload)


def _in_container(node: NodeAttempt, image: Path, program: list[str], mounts: list[Path]) -> list[str]:
    """Return a program's command line in the run's container. Raises TorchrelayError if this node cannot run it."""
    engine = container.find_engine()
    if engine is None:
        raise TorchrelayError(f"{node.host} has neither apptainer nor singularity, for --container {image}")
    if not image.exists():
        raise TorchrelayError(f"{node.host} does not have {image}, the image of --container")
    return container.inside(engine, image, program, mounts, node.spec.start_directory(node.run))
