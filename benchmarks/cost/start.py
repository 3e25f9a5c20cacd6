"""From an accepted job to its first step, and what runs beside the ranks then. For cost.py; on a testbed.

The same model, data and batch size on two nodes with a rank each: `hpc submit`, and sbatch with `srun torchrun` of
plain_ddp.py. Each part ends when the last node or rank has passed it, by the one clock of the machine.
"""

import gzip
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hpc_commands import hpc
from benchmarks.record import ROOT
from benchmarks.restart import marks
from hpc.core.events import ledger
from hpc.core.nodedir import NodeDir
from hpc.core.rundir import RunDir
from training.config.dataset_layout import FASHION_MNIST_DIRECTORY

NODES, BATCH = 2, 512
PARTS = {
    "slurm": "from the accepted job to the first line of its script",
    "agents": "until the agents of all nodes know each other; srun's start, where there are none",
    "staging": "until every node has the data on its own disk",
    "torchrun": "until all ranks have begun: the import of torch, once per node, and the rendezvous",
    "import": "until all ranks have imported what they need",
    "process group": "until all ranks have connected",
    "checks, data, model": "until the training is ready",
    "first step": "the step itself",
}
_START_SECONDS, _SETTLE_SECONDS = 300.0, 5.0
PLAIN = """#!/bin/bash
#SBATCH --job-name=plain --nodes={nodes} --ntasks-per-node=1 --cpus-per-task=1 --gpus-per-node=1 --time=60
#SBATCH --output={directory}/plain.log
date +%s.%N > {directory}/batch
export MARKS={directory}/marks OMP_NUM_THREADS=1 PYTHONPATH={repository}
head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)
srun --cpus-per-task=1 {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 \\
    --rdzv-backend=c10d --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID \\
    {repository}/benchmarks/restart/plain_ddp.py \\
    --data={directory} --checkpoint={directory}/checkpoint.pt --batch-size={batch} --save-every=100
"""


@dataclass(frozen=True, kw_only=True)
class Process:
    """What a process used while the ranks trained."""

    what: str
    """agent, batch script, wrapper, torchrun, rank, srun."""
    cpu_share: float
    """Seconds of CPU per second."""
    megabytes: float
    """Its share of the memory: pages that several processes have count in parts (PSS)."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a job, and the processes of its training."""

    parts: Mapping[str, float]
    processes: list[Process]
    beats_per_second: float | None = None
    """Of a rank's heartbeat file."""
    step_seconds: float | None = None
    samples: list[Any] = field(default_factory=list)


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The condition's first true answer."""
    deadline = time.monotonic() + _START_SECONDS
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} has not come within {_START_SECONDS:.0f} s")
        time.sleep(0.2)
    return answer


def wait_for_no_jobs() -> None:
    """Until nothing writes into the directories of the jobs, and the next one finds the nodes idle."""
    wait_for(lambda: not subprocess.check_output(["squeue", "--noheader"], text=True).strip(), "the end of the jobs")


def start_ours(directory: Path, name: str, sampled_seconds: float) -> Start:
    """Submit a run; when it has trained for a while, look at its processes, and cancel it."""
    batch = directory / f"{name}.batch"
    answer = hpc(
        "submit", f"--name={name}", f"--nodes={NODES}", "--gpus-per-node=1", "--cpus-per-gpu=1", "--data=fashion-mnist",
        f"--batch-size={BATCH}", "--epochs=10000", f"--setup=date +%s.%N > {shlex.quote(str(batch))}",
        directory=directory,
    )  # fmt: skip
    run = RunDir(Path(answer["run_dir"]))
    try:

        def first_steps() -> bool:
            return any(event["event"] == "first_step" for event in ledger.read(run.events))

        wait_for(first_steps, f"the first step of {run.path}")
        time.sleep(_SETTLE_SECONDS)
        # While it trains: the files of a node's memory go with the run.
        before = heartbeat(run)
        processes = sample(run.path, sampled_seconds)
        after = heartbeat(run)
    finally:
        hpc("cancel", name, directory=directory)
        wait_for_no_jobs()
    parts = parts_of_run(ledger.read(run.events), float(batch.read_text()))
    return Start(
        parts=parts, processes=processes, beats_per_second=rate(before, after, "count"),
        step_seconds=1 / rate(before, after, "step"),
    )  # fmt: skip


def heartbeat(run: RunDir) -> dict[str, float]:
    """The heartbeat of a rank: its step, its count of beats, its time. The nodes have a /dev/shm of their own."""
    rank = next(pid for pid in processes_below(run.path) if what_is(pid) == "rank")
    # A fork of torchrun has its command line, in which the wrapper's arguments are the logs and the node's memory.
    words = Path(f"/proc/{rank}/cmdline").read_bytes().decode().split("\0")
    memory = words[words.index("rank") + 2]
    path = NodeDir(Path(f"/proc/{rank}/root{memory}")).heartbeat(0)
    fields: dict[str, float] = json.loads(path.read_text())
    return fields


def rate(before: Mapping[str, float], after: Mapping[str, float], what: str) -> float:
    """By how much a number grows in a second."""
    return (after[what] - before[what]) / (after["time"] - before["time"])


def parts_of_run(events: Sequence[ledger.Event], batch: float) -> dict[str, float]:
    """The parts of our start."""

    def last(kind: str) -> ledger.Event:
        return max((event for event in events if event["event"] == kind), key=lambda event: float(event["time"]))

    started = last("train_started")
    began = float(started["time"]) - float(started["seconds"])
    ends = {
        "slurm": batch, "agents": last("joined")["time"], "staging": last("staged")["time"], "torchrun": began,
        "import": began, "process group": began + started["connect_seconds"],
        "checks, data, model": started["time"], "first step": last("first_step")["time"],
    }  # fmt: skip
    return between(float(last("submitted")["time"]), ends)


def between(began: float, ends: Mapping[str, float]) -> dict[str, float]:
    """The durations between times, and the total."""
    parts, before = dict[str, float](), began
    for part, end in ends.items():
        parts[part], before = max(0.0, end - before), max(end, before)
    return {**parts, "total": before - began}


def start_plain(directory: Path, sampled_seconds: float) -> Start:
    """The same with sbatch and srun torchrun."""
    directory.mkdir()
    (directory / "marks").mkdir()
    raw = directory / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in FASHION_MNIST_DIRECTORY.glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    script = directory / "plain.sbatch"
    script.write_text(
        PLAIN.format(nodes=NODES, directory=directory, repository=ROOT, python=sys.executable, batch=BATCH)
    )
    done = subprocess.run(["sbatch", "--parsable", str(script)], stdout=subprocess.PIPE, text=True, check=True)
    accepted = time.time()
    try:

        def first_steps() -> list[marks.Mark]:
            found = marks.read(directory / "marks")
            return found if sum(mark.name == "stepped" for mark in found) == NODES else []

        found = wait_for(first_steps, f"the first step of {script}")
        time.sleep(_SETTLE_SECONDS)
        processes = sample(directory, sampled_seconds)
    finally:
        subprocess.run(["scancel", done.stdout.strip()], check=True)
        wait_for_no_jobs()
    latest = {mark.name: mark.at for mark in found}  # in the order of their times
    batch = float((directory / "batch").read_text())
    # srun's start is not recorded: it is a part of torchrun's.
    ends = {
        "slurm": batch, "agents": batch, "staging": batch, "torchrun": latest["program"], "import": latest["imported"],
        "process group": latest["connected"], "checks, data, model": latest["restored"],
        "first step": latest["stepped"],
    }  # fmt: skip
    return Start(parts=between(accepted, ends), processes=processes)


def processes_below(directory: Path) -> list[int]:
    """The processes of a job: those whose command line names its directory, and their descendants."""
    parents, found = dict[int, int](), set[int]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(path.name)
            parents[pid] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if pid != os.getpid() and str(directory).encode() in (path / "cmdline").read_bytes():
                found.add(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def what_is(pid: int) -> str | None:
    """The kind of a process, None if it is none that matters."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    line = " ".join(words)
    if name == "srun" or name.startswith("slurm"):
        return None
    if name.startswith("rank-") or ("plain_ddp.py" in line and "torch.distributed.run" not in line):
        return "rank"
    if "jobs.agent" in words:
        return "agent"
    if "torch.distributed.run" in line or "torchrun_main.py" in line:
        if "process_wrapper.py" in "".join(words[:3]):
            return "torchrun's wrapper"
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        words_of_parent = Path(f"/proc/{parent}/cmdline").read_text(errors="replace").split("\0")
        is_wrapper = "torchrun_main.py" in "".join(words_of_parent[:3])
        return "rank's wrapper" if is_wrapper else "torchrun"
    return None


def sample(directory: Path, seconds: float) -> list[Process]:
    """What the processes of a job use."""

    def cpu_seconds(pid: int) -> float:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def megabytes(pid: int) -> float:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

    kinds = {pid: kind for pid in processes_below(directory) if (kind := what_is(pid))}
    began, before = time.monotonic(), {pid: cpu_seconds(pid) for pid in kinds}
    time.sleep(seconds)
    passed = time.monotonic() - began
    return [
        Process(what=kind, cpu_share=(cpu_seconds(pid) - before[pid]) / passed, megabytes=megabytes(pid))
        for pid, kind in kinds.items()
    ]


def start_rows(starts: Mapping[str, Sequence[Start]]) -> list[dict[str, object]]:
    """Medians of the parts, by kind."""
    return [
        {
            "start": kind,
            **{f"{part}, s": round(median(one.parts[part] for one in found), 2) for part in found[0].parts},
            "least, s": round(min(one.parts["total"] for one in found), 2),
            "most, s": round(max(one.parts["total"] for one in found), 2),
            "all": [dict(one.parts) for one in found],
        }
        for kind, found in starts.items()
    ]


def process_rows(starts: Mapping[str, Sequence[Start]]) -> list[dict[str, object]]:
    """Medians of what a node's processes use, by kind."""
    rows = []
    for kind, found in starts.items():
        processes = [process for one in found for process in one.processes]
        for what in sorted({process.what for process in processes}):
            same = [process for process in processes if process.what == what]
            rows.append(
                {
                    "start": kind, "process": what,
                    "CPU, ms/s": round(1000 * median(each.cpu_share for each in same), 1),
                    "most": round(1000 * max(each.cpu_share for each in same), 1),
                    "memory, MB": round(median(each.megabytes for each in same)),
                }
            )  # fmt: skip
    return rows
