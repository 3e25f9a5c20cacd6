"""Starts this node's torchrun, forwards stop signals to its ranks, and ends it. Runs on compute nodes.

Slurm delivers a step's signal to every process of the step. torchrun would answer by killing its ranks before they
could save; so it ignores SIGTERM and SIGUSR2 (jobs.ranks.process_wrapper), and so do the ranks until they have
installed their own handlers. They miss a signal that comes earlier, so the agent sends it again as soon as a rank
handles it.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hpc.base.environment import DATA, PARENT
from hpc.base.errors import EXIT_BAD_NODE, BadNodeError
from hpc.base.kernel import children, has_name, in_signal_mask
from jobs.node_attempt import log
from jobs.ranks import WRAPPER
from jobs.ranks.slurm_variables import NODE_LISTS

# The coordinator, which knows all ranks and steps, decides how often ranks restart (jobs.control.root_failure).
MAX_RESTARTS = 1_000_000
_ROOT = Path(__file__).parents[2]
# Python starts both by a path, because a user's PYTHONPATH must not replace them. They are directories with a
# `__main__.py`: unlike a file, Python also finds them in an archive.
TORCHRUN, PROCESS_WRAPPER = _ROOT / "training" / "runtime", _ROOT / "jobs" / "ranks"
"""Paths of our torchrun and of the process wrapper."""
NUM_START_WORDS = 3
"""Number of the first words of torchrun's command line with which it starts and waits for the others."""
STANDBY = "standby"
"""Word after the first ones that makes torchrun wait. Further words only make room for its name (`name_process`)."""
_ABORT_SECONDS = 3.0
_POLL_SECONDS = 0.05
# On this signal, torchrun's wrapper kills torchrun.
_END = signal.SIGRTMIN
# Longer than the wrapper waits for processes that SIGKILL does not end.
_KILL_SECONDS = 40.0
# A fork that takes longer than this is stuck: it usually takes milliseconds.
_FORK_SECONDS = 30.0
# Nothing reads these variables during the imports.
_LATE = frozenset({DATA, "GLOO_SOCKET_IFNAME", *NODE_LISTS})


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The rendezvous of one round, as one of its nodes sees it."""

    run: str
    attempt: int
    secret: str
    round: int
    num_nodes: int
    host: str
    """Address of the first node, to which the others report (training.runtime.node_rendezvous)."""
    port: int
    node: int
    """This node's index among the members of the round."""
    ports: Sequence[int] = ()
    """Ports on one of which the ranks' store listens; if empty, the kernel chooses the port."""

    @property
    def id(self) -> str:
        """Public name of the rendezvous. Only the secret excludes a process of an earlier attempt on the same port."""
        return f"{self.run}-{self.attempt}-{self.round}"


def torchrun_argv(
    rendezvous: Rendezvous, ranks: int, address: str, python: str, program: list[str], max_restarts: int = MAX_RESTARTS
) -> list[str]:
    """Return the command line of this node's torchrun, which runs `program` as each of its `ranks` ranks. Pure.

    torchrun runs the process wrapper in forks of itself, and executes any other program.
    """
    host = f"[{rendezvous.host}]" if ":" in rendezvous.host else rendezvous.host
    ports = f",ports={rendezvous.ports[0]}-{rendezvous.ports[-1]}" if rendezvous.ports else ""
    return [
        python, "-P", str(TORCHRUN),
        f"--nnodes={rendezvous.num_nodes}",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={max_restarts}",
        "--rdzv-backend=torchrelay",
        f"--rdzv-endpoint={host}:{rendezvous.port}",
        f"--rdzv-id={rendezvous.id}",
        f"--rdzv-conf=rank={rendezvous.node}{ports}",
        f"--local-addr={address}",
        *(("--run-path", "--start-method=fork") if program[0] == str(PROCESS_WRAPPER) else ("--no-python",)),
        # Without `--`, torchrun refuses a script's `--n 4` as an abbreviation of several flags of its own.
        "--",
        # For torchrun, `$$` stands for `$`.
        program[0], *(argument.replace("$", "$$") for argument in program[1:]),
    ]  # fmt: skip


class Torchrun:
    """One torchrun, its rank wrappers and their ranks. None of these processes outlives the `with` block."""

    def __init__(
        self, argv: list[str], environment: Mapping[str, str], directory: Path, *, contained: bool = False,
        waits: bool = False,
    ) -> None:  # fmt: skip
        """Start torchrun.

        If `contained`, `argv` starts a container, in which the process wrapper runs again. If it `waits`, torchrun does
        its imports, then waits until `begin` gives it its arguments.
        """
        self._contained = contained
        argv = [*argv[:NUM_START_WORDS], STANDBY, *argv[NUM_START_WORDS:]] if waits else argv
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(PROCESS_WRAPPER), "container" if contained else "torchrun", *argv],
            env={**environment, PARENT: str(os.getpid())},
            cwd=directory,
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
        )
        self._signalled = set[int]()
        self._forking = dict[int, float]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def begin(self, argv: list[str], environment: Mapping[str, str]) -> bool:
        """Give a torchrun that waits its command line and its environment. Return False if it cannot take them."""
        order = json.dumps({"argv": argv[NUM_START_WORDS:], "environment": dict(environment)}).encode()
        pipe = self._process.stdin
        # A longer write would wait until torchrun reads it.
        if self.exit_code is not None or pipe is None or len(order) > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
            return False
        try:
            with pipe:
                pipe.write(order)
        except BrokenPipeError:
            return False
        return True

    @property
    def exit_code(self) -> int | None:
        """Exit code of torchrun; None while it runs."""
        return self._process.poll()

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks."""
        # A rank is the first child of its wrapper. The other children are processes that the rank left behind.
        return [rank for wrapper in self._rank_wrappers() for rank in children(wrapper)[:1]]

    def _rank_wrappers(self) -> list[int]:
        torchruns = [torchrun for wrapper in self._wrappers() for torchrun in children(wrapper)]
        return [wrapper for torchrun in torchruns for wrapper in children(torchrun)]

    def _wrappers(self) -> list[int]:
        """Return the process id of torchrun's wrapper in a list, empty until a container has started the wrapper."""
        if not self._contained:
            return [self._process.pid]
        return [child for child in children(self._process.pid) if has_name(child, WRAPPER)]

    def kill_stuck_forks(self) -> None:
        """Kill forks of torchrun that have run nothing for half a minute: torchrun then starts its ranks again.

        Before Python 3.12 a child can hang forever in the fork if another thread of torchrun, such as one that serves
        the rendezvous, starts to call Python at that moment (python/cpython#112275).
        """
        now = time.monotonic()
        # The first action of a wrapper is to start a session.
        forking = [pid for pid in self._rank_wrappers() if not _leads_session(pid)]
        self._forking = {pid: self._forking.get(pid, now) for pid in forking}
        for pid, since in self._forking.items():
            if now - since > _FORK_SECONDS:
                log(f"a forked process started no rank within {_FORK_SECONDS:.0f} s: torchrun restarts the ranks")
                _send(pid, signal.SIGKILL)

    def forward(self, numbers: Sequence[signal.Signals]) -> None:
        """Send each rank the first of these stop signals that it handles. A rank that handles none gets no signal.

        Each rank gets only one signal: a second one would kill a Python that shuts down, and so has no handlers left.
        """
        for pid in set(self.ranks()) - self._signalled:
            number = next((number for number in numbers if handles(pid, number)), None)
            if number is not None:
                _send(pid, number)
                self._signalled.add(pid)

    def abort_ranks(self) -> None:
        """Make the ranks print their stacks and die, and kill those that do not die. torchrun restarts them.

        On SIGABRT Python's faulthandler prints the stacks of all threads, even if one waits for a device or another
        rank. A stopped process does not react, and is killed.
        """
        ranks = self.ranks()
        for pid in ranks:
            _send(pid, signal.SIGABRT)
        deadline = time.monotonic() + _ABORT_SECONDS
        while time.monotonic() < deadline and set(ranks) & set(self.ranks()):
            time.sleep(_POLL_SECONDS)
        for pid in set(ranks) & set(self.ranks()):
            _send(pid, signal.SIGKILL)

    def kill(self, seconds: float = _KILL_SECONDS) -> None:
        """Kill torchrun and all its processes, and wait for their end. Ranks that wait for a lost rank need SIGKILL.

        Raises:
            BadNodeError: a process could not be killed; not raised if `seconds` is too short to tell.
        """
        if self.exit_code is None:
            wrappers = self._wrappers()
            for wrapper in wrappers:
                _send(wrapper, _END)
            if wrappers:
                # Give Apptainer the time to end by itself, because it then unmounts its image.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(seconds)
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self.exit_code == EXIT_BAD_NODE:
            raise BadNodeError(
                f"a rank on {os.uname().nodename} cannot be killed: it waits in the kernel for a device or storage"
            )


class Standby:
    """At most one torchrun that waits for its round: it imports torch while the nodes meet, or while other ranks train.

    It gets its arguments and environment from the agent, and is of no use if its round needs another interpreter or
    other variables that modules may read during the imports.
    """

    def __init__(self) -> None:
        self._torchrun: Torchrun | None = None
        self._start: object = None

    def prepare(self, argv: list[str], environment: Mapping[str, str], directory: Path) -> None:
        """Start a torchrun that waits, for a command line and an environment like these. Raises OSError."""
        self.close()
        self._torchrun = Torchrun(argv, environment, directory, waits=True)
        self._start = _fixed(argv, environment)

    def take(self, argv: list[str], environment: Mapping[str, str]) -> Torchrun | None:
        """Start the round in the torchrun that waits. Returns None if there is none, or if it does not fit."""
        torchrun, self._torchrun = self._torchrun, None
        if torchrun is None:
            return None
        if self._start == _fixed(argv, environment) and torchrun.begin(argv, environment):
            return torchrun
        torchrun.kill()
        return None

    def close(self) -> None:
        """End the torchrun that waits, if there is one."""
        torchrun, self._torchrun = self._torchrun, None
        if torchrun is not None:
            torchrun.kill()


def _fixed(argv: list[str], environment: Mapping[str, str]) -> object:
    """Return what cannot be changed after the imports: the interpreter, and the variables that modules may read."""
    return argv[0], {name: value for name, value in environment.items() if name not in _LATE}


def handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    return in_signal_mask(pid, "SigCgt", number)


def _leads_session(pid: int) -> bool:
    """Return whether a process leads a session; also True if it has ended."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return True


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
