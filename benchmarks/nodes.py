"""What a start costs on more and more nodes, of a real Slurm on one machine: agents, staging, rendezvous.

    .venv/bin/hpc testbed up --profile ranges --nodes 32
    .venv/bin/python -m benchmarks.nodes

Each run has one rank per node, which prints when it starts; its data are 16 MB in 64 files. All nodes share the CPUs of
the machine: what grows in proportion to the nodes is the start of their processes, of which each torchrun takes two
seconds of CPU.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import Findings, Flags, Sample, benchmark, medians, say, take_turns
from hpc.run.events import kinds
from hpc.run.events.history import History
from hpc.run.rundir import RunDir

FILES, FILE_BYTES = 64, 2**18
SCRIPT = "import time\nprint('started', time.time())\n"


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Sizes of the runs."""
    turns: int = 3
    """Runs of each size."""


def start(nodes: int, directory: Path) -> list[Sample]:
    """Submit a run, wait for its end, and return what each part of its start took."""
    name = f"{nodes}-nodes-{len(list(directory.glob('runs/*')))}"
    data = directory / f"{name}.data"  # its own, which no node has yet
    data.mkdir()
    for number in range(FILES):
        (data / f"{number}.bin").write_bytes(os.urandom(FILE_BYTES))
    submit = [
        sys.executable, "-m", "hpc", "submit", "--wait", f"--name={name}", f"--nodes={nodes}", "--gpus-per-node=1",
        "--cpus-per-gpu=1", f"--data={data}", "--", "prints.py",
    ]  # fmt: skip
    subprocess.run(submit, cwd=directory, stdout=subprocess.DEVNULL, check=True)
    history = History.load(RunDir(directory / "runs" / name))
    if len(history.of(kinds.RoundStarted)) > 2:  # the preflight's, and the script's
        say(f"{name} was interrupted: once more")
        return start(nodes, directory)

    def last(kind: type[kinds.Event]) -> float:
        return max(event.time for event in history.of(kind))

    logs = RunDir(directory / "runs" / name).attempt_logs(1).glob("rank-*.log")
    started = re.findall(r"^started ([\d.]+)$", "".join(log.read_text() for log in logs), re.MULTILINE)
    return [
        {
            "slurm": last(kinds.Claimed) - last(kinds.Submitted), "agents": last(kinds.Joined) - last(kinds.Claimed),
            "staging": last(kinds.DataStaged) - last(kinds.Joined),
            "rendezvous": max(map(float, started)) - last(kinds.RoundStarted),
        }
    ]  # fmt: skip


def measure(options: Options) -> Findings:
    """Let the sizes take turns."""
    # Not below /tmp, which each node has for itself.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        directory = Path(made)
        (directory / "prints.py").write_text(SCRIPT)
        for command in (("git", "init", "-q"), ("git", "add", "prints.py")):
            subprocess.run(command, cwd=directory, check=True)
        sizes = {str(nodes): partial(start, nodes, directory) for nodes in options.nodes}
        found = take_turns(sizes, options.turns)
    rows = [{"nodes": int(nodes), **medians(samples, 1), "runs": samples} for nodes, samples in found.items()]
    return Findings(tables={"rows": rows})


if __name__ == "__main__":
    benchmark("nodes", Options, measure, small={"nodes": (1, 2), "turns": 1})
