"""What Torchrelay is for, in one small training: `make demo`.

    .venv/bin/python -m benchmarks.demo

Submits the built-in classifier as a user would, kills a rank in the middle, preempts the job, and prints what each
interruption cost. The same training, undisturbed, runs at the same time: the models are compared file by file. Without
a Slurm (`--cluster local`), nothing is preempted.
"""

import filecmp
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import hpc
from benchmarks import hpc_commands
from hpc.base import program

EPOCHS = 3  # two trainings share the machine: three epochs of each take two minutes on 2 cores
WORDS = ("-m", "hpc.submit", "--nodes", "2", "--gpus-per-node", "4", "--epochs", str(EPOCHS))
WEIGHTS = "model.safetensors"
# For each drill: the part of the training after which it is played, and what it does.
DRILLS = {"worker-kill": (1 / 3, "killed a rank"), "preempt": (2 / 3, "preempted the job")}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train, interrupt, and print what it cost."""

    cluster: Literal["slurm", "local"] = "slurm"
    """slurm: with a killed rank and a preemption; local: with a killed rank."""


@contextmanager
def submitted(command: list[str]) -> Iterator[tuple[hpc.Run, "subprocess.Popen[bytes]"]]:
    """Type a submission with --wait. Yield its run, and the process, which prints the run's progress."""
    others = {run.name for run in hpc.runs()}
    with subprocess.Popen(command) as waiting:
        while not (new := [run for run in hpc.runs() if run.name not in others]):
            if waiting.poll() is not None:
                sys.exit(waiting.returncode or 1)
            time.sleep(0.5)
        yield new[-1], waiting


def interrupt(run: hpc.Run, kind: str) -> str:
    """Wait until a part of the training is done, play a drill, and return a sentence on what it cost."""
    part, done = DRILLS[kind]
    while (now := run.status())["state"] in {"pending", "running"}:
        if now["total_steps"] and (now["step"] or 0) >= part * now["total_steps"]:
            break
        time.sleep(1)
    else:
        sys.exit(f"run {run.name} has ended before {kind}: {now['state']}")
    say(f"hpc drill {run.name} {kind} --yes")
    # An earlier interruption may still be listed as new: the last one is that of this drill.
    [*_, cost] = hpc_commands.hpc("drill", str(run.directory), kind, "--yes")["interruptions"]
    return f"{done} at step {now['step']}: {told(cost)}"


def told(cost: dict[str, Any]) -> str:
    """Return a sentence on the cost of an interruption."""
    steps = cost["steps_lost"]
    lost = f"{steps or 'no'} step{'s' * (steps != 1)} computed again"
    return f"training again after {cost['seconds']['total']:.1f} s, with {lost}"


def say(text: str) -> None:
    """Print a line in the middle of the progress, which is one line in a terminal."""
    print(("\r\x1b[K" if sys.stdout.isatty() else "") + f"demo: {text}", flush=True)


def compared(one: hpc.Run, other: hpc.Run) -> tuple[str, bool]:
    """Compare the files of two final models. Return a sentence, and whether the weights are equal."""
    first, second = (run.directory / "final" for run in (one, other))
    equal, *_ = filecmp.cmpfiles(first, second, [path.name for path in sorted(first.iterdir())], shallow=False)
    if WEIGHTS not in equal:
        return f"the weights DIFFER from those of {other.name}: {first / WEIGHTS}", False
    others = ", ".join(name for name in equal if name != WEIGHTS)
    return f"the weights equal those of {other.name}, byte for byte; so do {others}", True


def main() -> int:
    """Train twice, interrupt one of the runs, compare, and print a summary."""
    options = program.parse(Options, sys.argv[1:], "python -m benchmarks.demo")
    local = options.cluster == "local"
    undisturbed = hpc.submit(
        hpc.TrainingRun(
            nodes=2,
            gpus_per_node=4,
            epochs=EPOCHS,
            cluster=options.cluster,
            name=f"undisturbed-{time.strftime('%Y%m%d-%H%M%S')}",
        )
    )
    say(f"run {undisturbed.name} trains the same without interruptions, to compare the weights in the end")
    words = [*WORDS, *(["--cluster", "local"] if local else []), "--wait"]
    say(f"python {shlex.join(words)}")
    with submitted([sys.executable, *words]) as (run, waiting):
        costs = [interrupt(run, kind) for kind in DRILLS if not (local and kind == "preempt")]
    say(f"waiting for {undisturbed.name}")
    if waiting.returncode or undisturbed.wait()["state"] != "completed":
        return 1
    sentence, equal = compared(run, undisturbed)
    print("", *costs, sentence, f"report: {run.report()}", sep="\n")
    if not local:
        print("the Slurm keeps running: .venv/bin/hpc testbed down ends it")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
