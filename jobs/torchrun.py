"""This node's torchrun: start it, watch it, pass on a request to stop. Runs on compute nodes.

Slurm delivers a step's signal to every process of the step. torchrun would answer by killing its ranks, before they
could save; so it ignores SIGTERM and SIGUSR2 (ignoring survives exec), and so do the ranks until their own handlers
stand. A signal that came before that is lost to them, therefore the agent sends it again as soon as a rank can take it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.2
_ASK_SECONDS = 1.0
# After a request to stop, a torchrun without ranks only waits in its rendezvous for nodes that will not come.
_WITHOUT_RANKS_SECONDS = 5.0
_KILL_SECONDS = 10.0
_SHIELDED = (signal.SIGTERM, signal.SIGUSR2)
ENVIRONMENT = {
    # A crashed rank's peers hang in a collective and cannot obey SIGTERM: they get 5 s, not torchrun's 30.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
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


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What ends a torchrun that would go on by itself."""

    stop: StopRequest
    patience_seconds: float
    """How long after a request to stop the ranks may take."""
    superseded: Callable[[], bool]
    """Asked from time to time while there are no ranks yet: whether waiting any longer is in vain."""


def run(argv: list[str], environment: Mapping[str, str], directory: Path, watch: Watch) -> int:
    """Run torchrun to its end and return its exit code; whatever happens, nothing of it is left."""
    process = subprocess.Popen(
        argv,
        env={**environment, **ENVIRONMENT},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        preexec_fn=ignore_signals,  # noqa: PLW1509 - the agent has no threads
    )
    try:
        _watch(process, watch)
    finally:
        terminate(process)
    return process.returncode


def ignore_signals() -> None:
    """Ignore what torchrun must not answer; runs in the new process, before exec."""
    for number in _SHIELDED:
        signal.signal(number, signal.SIG_IGN)


def _watch(process: "subprocess.Popen[bytes]", watch: Watch) -> None:
    """Return when torchrun has ended, or should be ended."""
    told: set[int] = set()
    ranks_seen = ask_at = time.monotonic()
    ever_ranks = False
    while process.poll() is None:
        now = time.monotonic()
        ranks = children(process.pid)
        if ranks:
            ranks_seen, ever_ranks = now, True
        if watch.stop.signal and watch.stop.time is not None:
            told |= tell(set(ranks) - told, watch.stop.signal)
            without_ranks = now - max(ranks_seen, watch.stop.time)
            if without_ranks > _WITHOUT_RANKS_SECONDS or now - watch.stop.time > watch.patience_seconds:
                return
        elif not ever_ranks and now >= ask_at:
            ask_at = now + _ASK_SECONDS
            if watch.superseded():
                return
        time.sleep(_POLL_SECONDS)


def children(pid: int) -> list[int]:
    """The processes that a process has started: torchrun's are its ranks."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in path.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended since it was listed
    return found


def tell(ranks: set[int], number: signal.Signals) -> set[int]:
    """Send the signal to those ranks that have a handler for it, and return them.

    Once each: a Python that shuts down has taken its handlers away, and a second signal would kill it there.
    """
    # Ctrl-C asks the whole job to stop; to a rank it is a request to save like the others.
    polite = signal.SIGTERM if number is signal.SIGINT else number
    ready = {pid for pid in ranks if catches(pid, polite)}
    for pid in ready:
        _send(pid, polite)
    return ready


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


def terminate(process: "subprocess.Popen[bytes]") -> None:
    """End torchrun and its ranks: in good order first, by force if that takes too long."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        for pid in [process.pid, *children(process.pid)]:
            _send(pid, signal.SIGKILL)
        process.wait()
