"""Cuts runs of Lightning, of Accelerate and of this trainer, resumes them, and compares them with whole runs.

Prints a Markdown table row by row. Runs in an environment with the dependency group `rivals`.
"""

import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import tyro
from common import CHECKPOINT_EVERY, EPOCHS, GLOBAL_BATCH, SEED
from safetensors.torch import load_file
from torch import Tensor

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parents[1]
_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
_VARIANTS = {
    "lightning": ("plain", "stateful", "by-hand"),
    "accelerate": ("plain", "seedable", "stateful", "stateful-seedable", "by-hand"),
    "torchrelay": ("",),
}
_COLUMNS = (
    "library, variant", "ranks", "workers", "random", "whole = whole", "resumed = whole", "tensors that differ",
    "largest difference", "optimizer: differ", "largest", "other order", "other images", "accuracy whole", "resumed",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare. By default everything."""

    library: tuple[str, ...] = tuple(_VARIANTS)
    variant: tuple[str, ...] = ()
    """Only these variants."""
    ranks: tuple[int, ...] = (1, 2)
    workers: tuple[int, ...] = (0, 2)
    randomness: bool = True
    """Without it nothing but the order of the images is random: neither augmentation nor dropout."""
    images: int = 4000
    """Training images, the first ones of Fashion-MNIST."""
    timeout: float = 300
    """Seconds for a run."""
    scratch: Path | None = None
    """Directory to keep the runs and their logs in; by default they are deleted."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A variant of a library, and how it is started."""

    library: str
    variant: str
    ranks: int
    workers: int
    randomness: bool
    timeout: float

    def command(self, data: Path, directory: Path, extra: list[str]) -> list[str]:
        """What starts a run that writes into a directory."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        start = [sys.executable, *(launcher if self.ranks > 1 else []), *self._target(directory)]
        workers = "--num-workers" if self.library == "torchrelay" else "--workers"
        return [*start, f"--data={data}", f"{workers}={self.workers}", *extra]

    def _target(self, directory: Path) -> list[str]:
        if self.library == "torchrelay":
            flags = {"epochs": EPOCHS, "batch-size": GLOBAL_BATCH, "lr": 0.05, "seed": SEED, "log-every": 30}
            numbers = [f"--{name}={value}" for name, value in flags.items()]
            return ["-m", "training", *numbers, f"--checkpoint-every={CHECKPOINT_EVERY}", f"--run-dir={directory}"]
        switches = [] if self.randomness else ["--no-randomness"]
        script = str(_HERE / f"{self.library}_run.py")
        return [script, f"--out={directory / 'result.pt'}", f"--variant={self.variant}", *switches]


def write_subset(target: Path, images: int) -> None:
    """Copy Fashion-MNIST with the first training images only."""
    for source in _FASHION_MNIST.glob("*.gz"):
        raw = gzip.decompress(source.read_bytes())
        if source.name.startswith("train"):
            header, size = (16, 784) if "images" in source.name else (8, 1)
            raw = raw[:4] + images.to_bytes(4, "big") + raw[8 : header + images * size]
        (target / source.name).write_bytes(gzip.compress(raw, 1))


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a run with one thread in a process group of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("ab") as output:
        return subprocess.Popen(
            command, cwd=_REPOSITORY, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def finish(process: subprocess.Popen[bytes], log: Path, timeout: float) -> None:
    """Wait for a run that must succeed.

    Raises:
        RuntimeError: it failed; says in which line.
    """
    if process.wait(timeout):
        errors = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
        raise RuntimeError(f"ended with {process.returncode}: {errors[0] if errors else log}")


def run_whole(case: Case, data: Path, directory: Path) -> dict[str, Any]:
    """An uninterrupted run."""
    directory.mkdir(parents=True)
    log = directory.with_suffix(".log")
    finish(start(case.command(data, directory, []), log), log, case.timeout)
    return read_result(case, directory)


def run_cut(case: Case, data: Path, directory: Path) -> dict[str, Any]:
    """A run that is killed after a checkpoint in the middle of an epoch, and resumed."""
    directory.mkdir(parents=True)
    log = directory.with_suffix(".log")
    own = case.library == "torchrelay"
    process = start(case.command(data, directory, [] if own else [f"--until={CHECKPOINT_EVERY}"]), log)
    if own:
        kill_after_checkpoint(process, directory / "checkpoints" / f"step-{CHECKPOINT_EVERY:08d}", case.timeout)
    process.wait(case.timeout)
    if any((directory / name).exists() for name in ("final", "result.pt")):
        raise RuntimeError("ended before it could be cut")
    resume = case.command(data, directory, [] if own else [f"--resume={CHECKPOINT_EVERY}"])
    finish(start(resume, log), log, case.timeout)
    return read_result(case, directory)


def kill_after_checkpoint(process: subprocess.Popen[bytes], checkpoint: Path, timeout: float) -> None:
    """Kill a run and its ranks as soon as a checkpoint is there."""
    deadline = time.monotonic() + timeout
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)


def read_result(case: Case, directory: Path) -> dict[str, Any]:
    """Final weights, optimizer's state and test accuracy, and what was seen in each step where that is known."""
    if case.library != "torchrelay":
        result: dict[str, Any] = torch.load(directory / "result.pt", weights_only=False)
        return result
    newest = max((directory / "checkpoints").glob("step-*"))
    state = load_file(newest / "state.safetensors")
    optimizer = {name: value for name, value in state.items() if name.startswith("optimizer/")}
    model = load_file(directory / "final/model.safetensors")
    accuracy = json.loads((directory / "final/result.json").read_bytes())["test_accuracy"]
    return {"state": {"model": model, "optimizer": optimizer}, "accuracy": accuracy}


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested dictionaries and lists, in their order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(item)


def difference(left: Any, right: Any) -> tuple[int, int, float]:
    """How many tensors differ, of how many, and the largest absolute difference of two values in them."""
    pairs = list(zip(tensors(left), tensors(right), strict=True))
    gaps = [(a.double() - b.double()).abs().max().item() for a, b in pairs]
    return sum(not torch.equal(a, b) for a, b in pairs), len(pairs), max(gaps)


def others(whole: dict[str, Any], resumed: dict[str, Any], kind: str) -> str:
    """How many of the steps after the cut saw something else than in the whole run."""
    if kind not in whole:
        return "-"
    after = resumed[kind]
    return f"{sum(whole[kind].get(step) != seen for step, seen in after.items())} of {len(after)}"


def compare(case: Case, data: Path, directory: Path) -> list[str]:
    """Two whole runs and one that was cut: a row of the table."""
    name = [f"{case.library} {case.variant}", str(case.ranks), str(case.workers), "all" if case.randomness else "order"]
    try:
        whole, again = (run_whole(case, data, directory / run) for run in ("whole", "again"))
        resumed = run_cut(case, data, directory / "cut")
    except RuntimeError as error:
        return [*name, str(error), *[""] * (len(_COLUMNS) - len(name) - 1)]
    repeats = difference(whole["state"], again["state"])[0] == 0
    model, optimizer = (difference(whole["state"][key], resumed["state"][key]) for key in ("model", "optimizer"))
    same = model[0] == optimizer[0] == 0
    return [
        *name,
        *("yes" if repeats else "NO", "**yes**" if same else "no"),
        *(f"{model[0]} of {model[1]}", f"{model[2]:.2g}", f"{optimizer[0]} of {optimizer[1]}", f"{optimizer[2]:.2g}"),
        *(others(whole, resumed, "labels"), others(whole, resumed, "images")),
        *(f"{run['accuracy']:.2%}" for run in (whole, resumed)),
    ]


def cases(options: Options) -> Iterator[Case]:
    """Everything that is asked for."""
    for library in options.library:
        for variant in _VARIANTS[library]:
            for ranks, workers in ((r, w) for r in options.ranks for w in options.workers):
                if not options.variant or variant in options.variant:
                    how: dict[str, Any] = {"randomness": options.randomness, "timeout": options.timeout}
                    yield Case(library=library, variant=variant, ranks=ranks, workers=workers, **how)


def hardware() -> str:
    """The processor and its cores."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown processor")
    return f"{name}, {os.cpu_count()} cores, one thread per process"


def main(options: Options) -> None:
    """Run everything and print the table."""
    packages = ("torch", "lightning", "accelerate", "torchdata")
    print(", ".join(f"{name} {version(name)}" for name in packages), hardware(), sep="; ", end="\n\n")
    print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    with tempfile.TemporaryDirectory(prefix="exactness-") as scratch:
        place = options.scratch or Path(scratch)
        data = place / "data"
        data.mkdir(parents=True)
        write_subset(data, options.images)
        for number, case in enumerate(cases(options)):
            print(f"| {' | '.join(compare(case, data, place / str(number)))} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
