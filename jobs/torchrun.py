"""This node's torchrun: start it, watch it, pass on a request to stop. Runs on compute nodes.

Slurm delivers a step's signal to every process of the step. torchrun would answer by killing its ranks, before they
could save; so it ignores SIGTERM and SIGUSR2 (ignoring survives exec), and so do the ranks until their own handlers
stand. A signal that came before that is lost, therefore the agent repeats it for as long as the ranks run.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.2
_REPEAT_SECONDS = 1.0
# After a request to stop, a torchrun without ranks only waits in its rendezvous for nodes that will not come.
_WITHOUT_RANKS_SECONDS = 5.0
_KILL_SECONDS = 10.0
_SHIELDED = (signal.SIGTERM, signal.SIGUSR2)
ENVIRONMENT = {
    # SIGINT is left as the agent's way to end torchrun in good order.
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT",
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
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
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
        preexec_fn=_ignore_signals,  # noqa: PLW1509 - the agent has no threads
    )
    try:
        _watch(process, watch)
        return process.wait()
    finally:
        terminate(process)


def _ignore_signals() -> None:
    for number in _SHIELDED:
        signal.signal(number, signal.SIG_IGN)


def _watch(process: "subprocess.Popen[bytes]", watch: Watch) -> None:
    """Return when torchrun has ended, or should be ended."""
    repeat_at = ranks_seen = time.monotonic()
    ever_ranks = False
    while process.poll() is None:
        now = time.monotonic()
        ranks = children(process.pid)
        if ranks:
            ranks_seen, ever_ranks = now, True
        if watch.stop.signal and watch.stop.time is not None:
            ranks_gone = now - max(ranks_seen, watch.stop.time) > _WITHOUT_RANKS_SECONDS
            if ranks_gone or now - watch.stop.time > watch.patience_seconds:
                return terminate(process)
        if now >= repeat_at:
            repeat_at = now + _REPEAT_SECONDS
            if watch.stop.signal:
                send(ranks, watch.stop.signal)
            elif not ever_ranks and watch.superseded():
                return terminate(process)
        time.sleep(_POLL_SECONDS)
    return None


def children(pid: int) -> list[int]:
    """The processes that a process has started: torchrun's are its ranks."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in path.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended since it was listed
    return found


def send(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to processes, some of which may have ended."""
    # Ctrl-C asks the whole job to stop; to a rank it is a request to save like the others.
    polite = signal.SIGTERM if number is signal.SIGINT else number
    for pid in pids:
        try:
            os.kill(pid, polite)
        except ProcessLookupError:
            continue


def terminate(process: "subprocess.Popen[bytes]") -> None:
    """End torchrun and its ranks: in good order first, by force if that takes too long."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        for pid in [process.pid, *children(process.pid)]:
            send([pid], signal.SIGKILL)
        process.wait()
