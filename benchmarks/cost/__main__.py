"""What the tool itself costs: its commands, the start of a job, and what runs beside the ranks.

    .venv/bin/python -m benchmarks.cost
    .venv/bin/python -m benchmarks.cost --small --parts commands

- commands: time, CPU, memory and imports of `hpc submit --dry-run` and `hpc status`, against submitit and torchx.
- start: from the accepted job to its first step, by part, against sbatch with `srun torchrun` of a script that is
  written by hand (restart/plain_ddp.py): 2 nodes with one rank each, small-cnn, Fashion-MNIST. And what the node agents
  and other processes use while the ranks train.
- heartbeat: what a rank's sign of life costs.

On a Slurm of its own (`hpc testbed`): needs root. Prints tables in Markdown, writes benchmarks/results/cost.json.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from benchmarks import record
from benchmarks.cost import commands
from benchmarks.cost.start import NODES, PARTS, Start, process_rows, start_ours, start_plain, start_rows
from benchmarks.hpc_commands import testbed
from training.relay import Heartbeat

Part = Literal["commands", "start", "heartbeat"]
_BEATS = 20_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    parts: tuple[Part, ...] = ("commands", "start", "heartbeat")
    """See above."""
    rivals: Path = record.RIVALS
    """The Python that has submitit and torchx; without it they are left out."""
    repeats: int = 15
    """Of each command."""
    starts: int = 5
    """Of each kind of job."""
    seconds: float = 20.0
    """For which processes are watched."""
    small: bool = False
    """Two repeats of everything, and no file with the result."""


def measure_starts(options: Options) -> dict[str, list[Start]]:
    """Start jobs of both kinds in turns, after one of each that is not counted: it reads the files from the disk."""
    starts: dict[str, list[Start]] = {"torchrelay": [], "srun torchrun": []}
    # Not below /tmp, which each node has for itself.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-cost-") as made:
        directory = Path(made)
        for turn in range(options.starts + 1):
            seconds = options.seconds if turn else 1.0
            ours = start_ours(directory, f"run-{turn}", seconds)
            plain = start_plain(directory / f"plain-{turn}", seconds)
            for kind, found in (("torchrelay", ours), ("srun torchrun", plain)):
                print(f"start {turn}, {kind}: {found.parts['total']:.1f} s", file=sys.stderr, flush=True)
                if turn:
                    starts[kind].append(found)
    return starts


def heartbeat_rows(starts: list[Start]) -> list[dict[str, object]]:
    """What one beat costs, and its share of a rank's time, if the training was watched."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        heartbeat, micros = Heartbeat(Path(made) / "local-0", 0), []
        for _ in range(7):
            began = time.process_time()
            for step in range(_BEATS):
                heartbeat.beat("step", step)
            micros.append((time.process_time() - began) / _BEATS * 1e6)
    row: dict[str, object] = {"a beat, us of CPU": round(statistics.median(micros), 1)}
    if rates := [start.beats_per_second for start in starts if start.beats_per_second is not None]:
        per_second = statistics.median(rates)
        row |= {
            "beats per second": round(per_second, 1),
            "steps per second": round(1 / statistics.median(start.step_seconds or 0 for start in starts), 1),
            "share of a rank's time": f"{per_second * statistics.median(micros) / 1e6:.3%}",
        }
    return [row]


def main() -> None:
    """Measure, print, write."""
    options = tyro.cli(Options, description=__doc__)
    repeats = 2 if options.small else options.repeats
    if options.small:
        options = Options(parts=options.parts, rivals=options.rivals, starts=2, seconds=5.0, small=True)
    rivals = options.rivals if options.rivals.exists() else None
    if rivals is None:
        print(f"{options.rivals} does not exist: without submitit and torchx", file=sys.stderr)
    measured_on = record.machine(("torch", "submitit"))
    tables: dict[str, list[dict[str, object]]] = {}
    starts: dict[str, list[Start]] = {"torchrelay": []}
    if {"commands", "start"} & set(options.parts):
        with testbed(f"--nodes={NODES}", "--gpus-per-node=1"):
            if "commands" in options.parts:
                tables["commands"] = commands.measure(rivals, repeats)
            if "start" in options.parts:
                starts = measure_starts(options)
                tables |= {"start": start_rows(starts), "processes": process_rows(starts)}
    if "heartbeat" in options.parts:
        tables["heartbeat"] = heartbeat_rows(starts["torchrelay"])
    for rows in tables.values():
        print(record.table(rows), end="\n\n")
    if "start" in options.parts:
        print("\n".join(f"- {part}: {what}" for part, what in PARTS.items()))
    of_commands = tables.pop("commands", [])
    if not options.small:
        record.write("cost", measured_on, of_commands, parts=PARTS, **tables)


if __name__ == "__main__":
    main()
