"""What a start costs on more and more nodes, of a real Slurm on one machine: agents, staging, rendezvous.

    .venv/bin/hpc testbed up --profile ranges
    .venv/bin/python -m benchmarks.nodes [NODES...]

Each size is a run of one rank per node, which prints when it starts; its data are 16 MB in 64 files. Prints the median
of some runs, as a table in Markdown, and writes benchmarks/results/nodes.json. All nodes share the CPUs of the machine:
what grows in proportion to the nodes is the start of their processes, two seconds of CPU for each torchrun.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from benchmarks import record
from hpc.core.events import ledger
from hpc.core.events.ledger import Event
from hpc.core.rundir import RunDir

SIZES, TURNS = (1, 2, 4, 8, 16, 32), 3
FILES, FILE_BYTES = 64, 2**18
SCRIPT = "import time\nprint('started', time.time())\n"


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """One run's start, from the times of its events, by the one clock of the machine."""

    slurm: float
    """From the submission until the head node's agent claimed the attempt."""
    agents: float
    """From then until all agents were connected to it."""
    staging: float
    """From then until every node had the data."""
    rendezvous: float
    """From the last round's announcement until all of its ranks had started."""


def train(nodes: int, directory: Path) -> Seconds:
    """Submit a run, and wait for its end."""
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
    run = RunDir(directory / "runs" / name)
    events = ledger.read(run.events)
    if sum(event["event"] == "rendezvous" for event in events) > 2:  # the preflight's, and the script's
        print(f"{name} was interrupted: once more", file=sys.stderr)
        return train(nodes, directory)
    return seconds_of(run, events)


def seconds_of(run: RunDir, events: list[Event]) -> Seconds:
    """What a run's events and logs tell of its start."""

    def last(kind: str) -> float:
        return max(float(event["time"]) for event in events if event["event"] == kind)

    printed = "".join(log.read_text() for log in run.attempt_logs(1).glob("rank-*.log"))
    started = [float(at) for at in re.findall(r"^started ([\d.]+)$", printed, re.MULTILINE)]
    return Seconds(
        slurm=last("claimed") - last("submitted"), agents=last("joined") - last("claimed"),
        staging=last("staged") - last("joined"), rendezvous=max(started) - last("rendezvous"),
    )  # fmt: skip


def main(sizes: list[int]) -> None:
    """Measure each size, print a table, write the result."""
    measured_on = record.machine()
    names = [field.name for field in fields(Seconds)]
    print(f"| nodes | {' | '.join(f'{name}, s' for name in names)} |\n|--:|{'--:|' * len(names)}", flush=True)
    rows = []
    # Not below /tmp, which each node has for itself.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        directory = Path(made)
        (directory / "prints.py").write_text(SCRIPT)
        for command in (("git", "init", "-q"), ("git", "add", "prints.py")):
            subprocess.run(command, cwd=directory, check=True)
        for nodes in sizes:
            found = [asdict(train(nodes, directory)) for _ in range(TURNS)]
            row = {name: round(median(one[name] for one in found), 1) for name in names}
            rows.append({"nodes": nodes, **row, "runs": found})
            print(f"| {nodes} | {' | '.join(str(row[name]) for name in names)} |", flush=True)
    record.write("nodes", measured_on, rows)


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or list(SIZES))
