"""How soon the ranks of all nodes run again after one of them was killed: our rendezvous against torch's.

    .venv/bin/python -m benchmarks.rendezvous

Starts a torchrun for each of two pretended nodes, with ranks that only note when they start, and kills one of them
again and again: what is measured is torchrun's part of a restart, without the ranks' imports. Backends take turns.
"""

import os
import secrets
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import quantiles

from jobs.ranks.rendezvous import Rendezvous, pick_port, torchrun_argv, torchrun_environment
from jobs.ranks.torchrun import Torchrun

BACKENDS = ("torchrelay", "c10d")
TURNS, KILLS = 3, 10
RANK = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_DFL)
name = pathlib.Path(sys.argv[1], os.environ["RANK"])
name.with_suffix(".new").write_text(f"{os.getpid()} {time.time()}")
name.with_suffix(".new").rename(name)
time.sleep(1000)
"""
# Those with which Torchrelay used c10d.
OPTIONS = {"torchrelay": "rank={node}", "c10d": "is_host={is_host},keep_alive_interval=2,keep_alive_max_attempt=3"}


def started(directory: Path, after: float) -> dict[int, tuple[int, float]]:
    """Process id and start time of each rank that has started after a time."""
    found = {}
    for name in directory.iterdir():
        if name.suffix != ".new":
            pid, at = name.read_text().split()
            if float(at) > after:
                found[int(name.name)] = (int(pid), float(at))
    return found


def measure(backend: str, directory: Path) -> list[float]:
    """Seconds from each kill until the ranks of both nodes have started again."""
    meeting = Rendezvous(
        run="r",
        attempt=1,
        secret=secrets.token_hex(16),
        round=1,
        num_nodes=2,
        host="localhost",
        port=pick_port(),
        node=0,
    )
    found, killed_at = list[float](), 0.0
    with ExitStack() as nodes:
        for node in (0, 1):
            argv = torchrun_argv(
                replace(meeting, node=node),
                1,
                "127.0.0.1",
                sys.executable,
                [sys.executable, "-c", RANK, str(directory)],
            )
            options = OPTIONS[backend].format(node=node, is_host=int(node == 0))
            argv = [
                {"--rdzv-backend=torchrelay": f"--rdzv-backend={backend}"}.get(each, each)
                if not each.startswith("--rdzv-conf=") else f"--rdzv-conf={options}"
                for each in argv
            ]  # fmt: skip
            environment = torchrun_environment(meeting, {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
            nodes.enter_context(Torchrun(argv, environment, directory))
        for number in range(KILLS + 1):
            while len(ranks := started(directory, killed_at)) < 2:
                time.sleep(0.01)
            if number:
                found.append(max(at for _, at in ranks.values()) - killed_at)
            time.sleep(1)
            killed_at = time.time()
            os.kill(ranks[number % 2][0], signal.SIGKILL)
    return found


def main() -> None:
    """Measure, and print a table in Markdown."""
    found: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in range(TURNS):
        for backend in BACKENDS:
            with tempfile.TemporaryDirectory() as directory:
                found[backend] += measure(backend, Path(directory))
    print("| rendezvous | restarts | first quartile, s | median, s | third quartile, s |\n|---|--:|--:|--:|--:|")
    for backend, seconds in found.items():
        print(f"| {backend} | {len(seconds)} | {' | '.join(f'{each:.2f}' for each in quantiles(seconds, n=4))} |")


if __name__ == "__main__":
    main()
