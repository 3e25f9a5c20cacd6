"""This node's torchrun: start it, pass on a request to stop, end it. Runs on compute nodes.

Slurm delivers a step's signal to every process of the step. torchrun would answer by killing its ranks, before they
could save; so it ignores SIGTERM and SIGUSR2 (jobs.ranks.ignore_signals), and so do the ranks until their own
handlers stand. A
signal that came before that is lost to them, therefore the agent sends it again as soon as a rank can take it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from hpc.core.kernel import children

_SHIELD = Path(__file__).with_name("ignore_signals.py")
_ABORT_SECONDS = 3.0
_POLL_SECONDS = 0.05
ENVIRONMENT = {
    # A crashed rank's peers hang in a collective and cannot obey SIGTERM; who is to save is told by the agent.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1",
    # A store of their own for the ranks of each restart. In torchrun's, which all restarts share, a rank finds the
    # address of one that is dead (gloo: "connectFullMesh failed"), unless all nodes' torchruns have counted the same
    # number of restarts; they have not (pytorch/pytorch#135712, #108158).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class StopRequest:
    """Remembers the first signal that asked this agent to stop. The handler does nothing else."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.time: float | None = None

    def install(self) -> None:
        """Listen to the time limit's warning, to Slurm's SIGTERM and to Ctrl-C."""
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, number: int, _frame: object) -> None:
        """Note the first signal."""
        if self.signal is None:
            self.signal = signal.Signals(number)
            self.time = time.monotonic()

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def seconds(self) -> float:
        """Since the request; 0 before it."""
        return 0.0 if self.time is None else time.monotonic() - self.time


class Torchrun:
    """One torchrun, its rank wrappers and their ranks. Nothing of it outlives this object."""

    def __init__(self, argv: list[str], environment: Mapping[str, str], directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(_SHIELD), *argv],
            env={**environment, **ENVIRONMENT},
            cwd=directory,
            stdin=subprocess.DEVNULL,
        )
        self._told: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def ranks(self) -> list[int]:
        """The process ids of its ranks."""
        return [rank for keeper in children(self._process.pid) for rank in children(keeper)]

    def tell(self, number: signal.Signals) -> None:
        """Send the signal to those ranks that have a handler for it.

        Once each: a Python that shuts down has taken its handlers away, and a second signal would kill it there.
        """
        # Ctrl-C asks the whole job to stop; to a rank it is a request to save like the others.
        polite = signal.SIGTERM if number is signal.SIGINT else number
        for pid in set(self.ranks()) - self._told:
            if catches(pid, polite):
                _send(pid, polite)
                self._told.add(pid)

    def abort_ranks(self) -> None:
        """Have the ranks print where they are and die, by force if need be; torchrun starts them again.

        Python's faulthandler answers SIGABRT with the stacks of all threads, also while one waits for a device or
        another rank; a stopped process answers nothing.
        """
        ranks = self.ranks()
        for pid in ranks:
            _send(pid, signal.SIGABRT)
        deadline = time.monotonic() + _ABORT_SECONDS
        while time.monotonic() < deadline and set(ranks) & set(self.ranks()):
            time.sleep(_POLL_SECONDS)
        for pid in set(ranks) & set(self.ranks()):
            _send(pid, signal.SIGKILL)

    def kill(self) -> None:
        """End all of it at once: ranks that wait for a lost one answer nothing else."""
        if self.exit_code is not None:
            return
        # While it is stopped it starts no new ranks.
        self._process.send_signal(signal.SIGSTOP)
        for keeper in children(self._process.pid):
            # A keeper leads a session, with its rank and the rank's loader workers in it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(keeper, signal.SIGKILL)
        self._process.kill()
        self._process.wait()


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
