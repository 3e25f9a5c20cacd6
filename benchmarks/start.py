"""From an accepted job to its first step, by part, and what the node agents use while the ranks train.

    .venv/bin/python -m benchmarks.start

The same model, data and batch size on two nodes with a rank each, on a testbed of its own, which needs root: `hpc
submit`, and sbatch with `srun torchrun` of a script that is written by hand (recovery/rivals/torchrun_ddp.py). Each
part ends when the last node or rank has passed it, by the one clock of the machine:

- slurm: from the accepted job to the first line of its script;
- agents: until the agents of all nodes know each other; staging: until every node has the data on its own disk. srun
  torchrun has neither, and the start of srun is a part of torchrun's there;
- torchrun: until all ranks have begun: the import of torch, once per node, and the rendezvous;
- import, process group: until all ranks have imported what they need, and have connected;
- checks, data, model: until the training is ready; then the first step.
"""

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.fashion_mnist import unpack
from benchmarks.harness import ROOT, Findings, Flags, Sample, Turn, benchmark, medians, spread, take_turns
from benchmarks.hpc_commands import hpc, testbed
from benchmarks.processes import cpu_seconds, memory_bytes, naming
from benchmarks.recovery.rivals import step_log
from hpc.cluster.testbed.system import wait_until
from hpc.run.events import kinds
from hpc.run.events.history import History
from hpc.run.rundir import RunDir

NODES, BATCH = 2, 512
_PATIENCE_SECONDS, _SETTLE_SECONDS = 300.0, 5.0
PLAIN = """#!/bin/bash
#SBATCH --job-name=plain --nodes={nodes} --ntasks-per-node=1 --cpus-per-task=1 --gpus-per-node=1 --time=60
#SBATCH --output={directory}/plain.log
date +%s.%N > {directory}/batch
export OMP_NUM_THREADS=1
head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)
srun --cpus-per-task=1 {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 \\
    --rdzv-backend=c10d --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID \\
    {repository}/benchmarks/recovery/rivals/torchrun_ddp.py \\
    --data={directory}/raw --output={directory} --images=60000 --batch-size={batch} --save-every=100
"""


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    turns: int = 5
    """Starts of each kind."""
    seconds: float = 20.0
    """Seconds for which the agents are watched."""


def wait_for_no_jobs() -> None:
    """Wait until nothing writes into the directories of the jobs, and the next one finds the nodes idle."""
    wait_until(
        lambda: not subprocess.check_output(["squeue", "--noheader"], text=True).strip(),
        seconds=_PATIENCE_SECONDS, what="the jobs to end",
    )  # fmt: skip


def between(began: float, ends: Mapping[str, float]) -> dict[str, float]:
    """Return the durations between times, and the total."""
    parts, before = dict[str, float](), began
    for part, end in ends.items():
        parts[part], before = max(0.0, end - before), max(end, before)
    return {**parts, "total": before - began}


def start_ours(directory: Path, seconds: float, agents: list[Sample]) -> list[Sample]:
    """Submit a run; when it trains, look at its agents, and cancel it."""
    name = f"run-{len(agents)}"
    batch = directory / f"{name}.batch"
    answer = hpc(
        "submit", f"--name={name}", f"--nodes={NODES}", "--gpus-per-node=1", "--cpus-per-gpu=1", "--data=fashion-mnist",
        f"--batch-size={BATCH}", "--epochs=10000", f"--setup=date +%s.%N > {shlex.quote(str(batch))}",
        directory=directory,
    )  # fmt: skip
    run = RunDir(Path(answer["run_dir"]))
    try:
        wait_until(
            lambda: bool(History.load(run).of(kinds.FirstStep)), seconds=_PATIENCE_SECONDS, what=f"{name} to train"
        )
        time.sleep(_SETTLE_SECONDS)
        agents += watch_agents(run.path, seconds)
    finally:
        hpc("cancel", name, directory=directory)
        wait_for_no_jobs()
    return [parts_of_run(History.load(run), float(batch.read_text()))]


def parts_of_run(history: History, batch: float) -> dict[str, float]:
    """Return the parts of our start."""

    def last(kind: type[kinds.Event]) -> float:
        return max(event.time for event in history.of(kind))

    [*_, started] = history.of(kinds.TrainStarted)
    began = started.time - (started.seconds or 0.0)
    ends = {
        "slurm": batch, "agents": last(kinds.Joined), "staging": last(kinds.DataStaged), "torchrun": began,
        "import": began, "process group": began + (started.connect_seconds or 0.0),
        "checks, data, model": started.time, "first step": last(kinds.FirstStep),
    }  # fmt: skip
    return between(last(kinds.Submitted), ends)


def start_plain(directory: Path) -> list[Sample]:
    """Start the same with sbatch and srun torchrun."""
    directory = Path(tempfile.mkdtemp(dir=directory, prefix="plain-"))
    unpack(directory / "raw")
    script = directory / "plain.sbatch"
    values = {"nodes": NODES, "directory": directory, "repository": ROOT, "python": sys.executable, "batch": BATCH}
    script.write_text(PLAIN.format(**values))
    done = subprocess.run(["sbatch", "--parsable", str(script)], stdout=subprocess.PIPE, text=True, check=True)
    accepted = time.time()

    def entries(event: str) -> list[step_log.Entry]:
        return [entry for entry in step_log.read(directory / "steps.jsonl") if entry["event"] == event]

    try:
        wait_until(lambda: len(entries("first_step")) == NODES, seconds=_PATIENCE_SECONDS, what=f"{script} to train")
    finally:
        subprocess.run(["scancel", done.stdout.strip()], check=True)
        wait_for_no_jobs()
    batch, starts = float((directory / "batch").read_text()), entries("start")
    ends = {
        "slurm": batch, "agents": batch, "staging": batch, "torchrun": max(entry["began"] for entry in starts),
        "import": max(entry["imported"] for entry in starts),
        "process group": max(entry["connected"] for entry in starts),
        "checks, data, model": max(entry["time"] for entry in starts),
        "first step": max(entry["time"] for entry in entries("first_step")),
    }  # fmt: skip
    return [between(accepted, ends)]


def watch_agents(run: Path, seconds: float) -> list[Sample]:
    """Return what each agent of a run uses: CPU time per second, and memory."""
    pids = [pid for pid, words in naming(run).items() if words[0] == "jobs.agent"]
    before = {pid: cpu_seconds(pid) for pid in pids}
    time.sleep(seconds)
    return [
        {
            "CPU, ms/s": 1000 * (cpu_seconds(pid) - before[pid]) / seconds,
            "memory, MB": memory_bytes([pid], "Pss") / 2**20,
        }
        for pid in pids
    ]


def measure(options: Options) -> Findings:
    """Let both kinds of jobs take turns."""
    agents: list[Sample] = []
    # Not below /tmp, which each node has for itself.
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-start-") as made,
        testbed(f"--nodes={NODES}", "--gpus-per-node=1"),
    ):
        contenders: dict[str, Turn] = {
            "torchrelay": partial(start_ours, Path(made), options.seconds, agents),
            "srun torchrun": partial(start_plain, Path(made)),
        }
        found = take_turns(contenders, options.turns, warm_up=True)
    rows = [
        {
            "start": kind, **medians(samples, unit=", s"),
            **spread([each["total"] for each in samples], unit=", s"), "all": samples,
        }
        for kind, samples in found.items()
    ]  # fmt: skip
    most = round(max(each["CPU, ms/s"] for each in agents), 1)
    return Findings(tables={"rows": rows, "agents": [{**medians(agents, 1), "most CPU, ms/s": most}]})


if __name__ == "__main__":
    benchmark("start", Options, measure, small={"turns": 1, "seconds": 3.0})
