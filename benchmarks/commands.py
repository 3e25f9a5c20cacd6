"""What a command costs who types it: time, CPU and memory of `hpc submit` and `hpc status`, submitit and torchx.

    .venv/bin/python -m benchmarks.commands
    .venv/bin/python -m benchmarks.commands --runs 1000 4000 --jobs-per-run 10 --turns 1

Runs on the login node of a testbed of its own, which needs root. The runs that `hpc status` shows are made for it
(`many_runs.py`), with a full queue; a real squeue's own time comes on top. The commands take turns.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import many_runs
from benchmarks.harness import Findings, RivalFlags, Sample, benchmark, medians, spread, take_turns
from benchmarks.hpc_commands import testbed

HPC = str(Path(sys.executable).with_name("hpc"))
SUBMITIT = """
import submitit
executor = submitit.AutoExecutor(folder="logs", cluster="slurm")
executor.update_parameters(nodes=2, tasks_per_node=1, cpus_per_task=1, timeout_min=60, slurm_gpus_per_node=1)
print(executor._executor._make_submission_file_text("torchrun train.py", "id"))
"""
# A process that looks three times, asks squeue each time, and prints the seconds of CPU of the last look.
WATCH = """
import json, sys, time
from pathlib import Path
from hpc.commands import cli
from hpc.status import run_view
run_view._QUEUE_SECONDS = 0
cache = run_view.StatusCache()
for _ in range(3):
    before = time.process_time()
    cache.summaries(cli.all_runs(Path(sys.argv[1])))
    seconds = time.process_time() - before
print(json.dumps(seconds))
"""
LOOK = "hpc status --watch, a further look"


@dataclass(frozen=True, kw_only=True)
class Options(RivalFlags):
    """How much to measure."""

    turns: int = 15
    """Turns of each command."""
    runs: tuple[int, ...] = (200,)
    """Numbers of runs that `hpc status` shows."""
    jobs_per_run: int = 1
    """Jobs in the queue."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What somebody types."""

    name: str
    argv: Sequence[str]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, output: int) -> "subprocess.Popen[str]":
        """Type it."""
        return subprocess.Popen(
            self.argv, cwd=self.directory, env=os.environ | dict(self.environment), stdout=output,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def turn(self) -> list[Sample]:
        """Return the seconds, and the seconds of CPU of the command and its children."""
        began = time.perf_counter()
        child = self.start(subprocess.PIPE)
        assert child.stdout is not None  # noqa: S101  # it is a pipe
        printed = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{shlex.join(self.argv)} failed:\n{printed}")
        cpu = float(json.loads(printed)) if self.name.startswith(LOOK) else usage.ru_utime + usage.ru_stime
        return [{"seconds": time.perf_counter() - began, "CPU, s": cpu}]

    def peak_megabytes(self) -> int:
        """Return the most memory that the process itself has had.

        The kernel's record of a child that has ended begins with what its parent had, so the process is looked at
        while it runs.
        """
        peak, child = 0, self.start(subprocess.DEVNULL)
        while child.poll() is None:
            with suppress(OSError):
                lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
                peak = max([peak, *(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))])
            time.sleep(0.001)
        return round(peak / 1024)


def submissions(root: Path, rivals: Path) -> list[Command]:
    """Return the commands that submit a script, or show what they would submit."""
    project = root / "project"
    project.mkdir()
    (project / "train.py").write_text("import torch\nprint(torch.__version__)\n")
    for command in (("git", "init", "-q"), ("git", "add", "train.py")):
        subprocess.run(command, cwd=project, check=True)
    path = {"PATH": f"{rivals.parent}:{os.environ['PATH']}"}
    torchx = [str(rivals.with_name("torchx")), "run", "--dryrun", "-s", "slurm", "dist.ddp", "-j", "2x1"]
    submit = [HPC, "submit", "--dry-run", "--nodes=2", "--gpus-per-node=1", "--cpus-per-gpu=1", "--time=1h"]
    return [
        Command(name=name, argv=argv, directory=project, environment=path)
        for name, argv in {
            "hpc submit --dry-run -- train.py": [*submit, "--", "train.py"],
            "submitit: the text of its script": [str(rivals), "-c", SUBMITIT],
            "torchx run --dryrun -s slurm": [*torchx, "--script", "train.py"],
        }.items()
    ]


def looks(root: Path, runs: int, jobs: int) -> list[Command]:
    """Return the commands that look at many runs."""
    made = root / f"{runs}-runs"
    made.mkdir()
    environment, where = many_runs.make(made, runs, jobs), str(made / "runs")
    found = {
        f"hpc {words}": [HPC, *words.split(), f"--runs-dir={where}"]
        for words in ("status", "status --json", "supervise --once --dry-run")
    } | {LOOK: [sys.executable, "-c", WATCH, where]}
    return [
        Command(name=f"{name}, {runs:,} runs", argv=argv, directory=made, environment=environment)
        for name, argv in found.items()
    ]


def measure(options: Options) -> Findings:
    """Let the commands take turns."""
    # Not below /tmp, which each node has for itself: no place for a run.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made, testbed("--nodes=2", "--gpus-per-node=1"):
        root = Path(made).resolve()
        commands = submissions(root, options.rivals)
        commands += [each for runs in options.runs for each in looks(root, runs, options.jobs_per_run * runs)]
        found = take_turns({each.name: each.turn for each in commands}, options.turns, warm_up=True)
        rows = [
            {
                "command": each.name,
                **medians(found[each.name], 3),
                **spread([sample["seconds"] for sample in found[each.name]], 3),
                "peak memory, MB": each.peak_megabytes(),
            }
            for each in commands
        ]
    return Findings(tables={"rows": rows})


if __name__ == "__main__":
    benchmark("commands", Options, measure, small={"turns": 1, "runs": (20,)}, packages=("torch", "submitit"))
