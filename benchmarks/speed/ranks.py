"""The ranks of one training loop, each on a core of its own: what `benchmarks/speed` starts, asks and measures."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, Self

from benchmarks.harness import ROOT
from benchmarks.processes import descendants, memory_bytes
from benchmarks.speed.rank import RANKS

_TIMEOUT, _FIRST_STEP_TIMEOUT = 300.0, 90.0
# How often memory is looked at.
_PAUSE = 0.05


class NoAnswerError(Exception):
    """A rank hangs."""


class Ranks:
    """Two processes that train together, until the context ends."""

    def __init__(self, python: Path, loop: str, case: dict[str, Any], directory: Path) -> None:
        """Start them.

        Args:
            python: of the environment that has all libraries.
            loop: one of `rank.LOOPS`.
            case: the fields of `loops.Case`, with paths as text.
            directory: a new one, for their files.
        """
        (directory / "node").mkdir(parents=True, mode=0o700)
        self._logs = [directory / f"rank-{rank}.log" for rank in range(RANKS)]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        cores = sorted(os.sched_getaffinity(0))
        self._processes = []
        for rank, log in enumerate(self._logs):
            core = cores[rank % len(cores)]
            command = [str(python), "-m", "benchmarks.speed.rank", loop, str(directory), str(core), json.dumps(case)]
            with log.open("w") as output:
                process = subprocess.Popen(
                    command, env=_environment(rank, port), cwd=directory, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True,
                )  # fmt: skip
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End them: a rank that waits for its turn ends when stdin does."""
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]  # they are pipes
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            # A loader worker that hangs outlives its rank.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def wait_for_first_step(self) -> None:
        """Wait until they train. Raises NoAnswerError if a rank hangs."""
        self._reports(_FIRST_STEP_TIMEOUT)

    def turn(self, lead: int, steps: int) -> tuple[float, float]:
        """Make `lead` steps, then others; return the seconds of the slowest rank for these, and the page faults."""
        self._begin(lead, steps)
        reports = self._reports()
        return max(report["seconds"] for report in reports), sum(report["page_faults"] for report in reports)

    def peak_bytes(self, steps: int) -> int:
        """Return the highest memory of a rank and its loader workers in so many steps."""
        self._begin(0, steps)
        peak, streams = 0, [process.stdout for process in self._processes if process.stdout]
        while len(select.select(streams, [], [], _PAUSE)[0]) < len(streams):
            for process in self._processes:
                # Without the code of libraries, which all processes of a machine share.
                own = (process.pid, *descendants(process.pid))
                peak = max(peak, memory_bytes(own, "Pss_Anon", "Pss_Shmem"))
        self._reports()
        return peak

    def _begin(self, lead: int, steps: int) -> None:
        for process in self._processes:
            assert process.stdin is not None  # noqa: S101  # it is a pipe
            # Of a rank that has died, `_reports` says why.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps([lead, steps]) + "\n")
                process.stdin.flush()

    def _reports(self, timeout: float = _TIMEOUT) -> list[dict[str, float]]:
        reports = []
        for process, log in zip(self._processes, self._logs, strict=True):
            assert process.stdout is not None  # noqa: S101  # it is a pipe
            if not select.select([process.stdout], [], [], timeout)[0]:
                raise NoAnswerError(f"a rank has not answered for {timeout:.0f} s; its log:\n{log.read_text()[-4000:]}")
            line = process.stdout.readline()
            if not line:
                log_end = log.read_text()[-4000:]
                raise SystemExit(f"a rank has ended with code {process.wait()}; its log ends with:\n{log_end}")
            reports.append(json.loads(line))
        return reports


def _environment(rank: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for two ranks on this machine, and CPUs alone."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    fixed = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return os.environ | {name: str(value) for name, value in place.items()} | fixed
