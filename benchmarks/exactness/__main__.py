"""Cuts runs of Lightning, of Accelerate and of this trainer, resumes them, and compares them with whole runs.

    rivals/bin/python -m benchmarks.exactness

README.md says what is compared, and why the results are what they are. Each variant has a row; "order" has nothing
random but the order of the images.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.exactness.common import CHECKPOINT_EVERY, EPOCHS, GLOBAL_BATCH, SEED
from benchmarks.fashion_mnist import write_first
from benchmarks.harness import ROOT, Findings, Flags, Row, benchmark, say
from training.config.dataset_layout import FASHION_MNIST_DIRECTORY

VARIANTS = {
    "lightning": ("plain", "stateful", "by-hand"),
    "accelerate": ("plain", "seedable", "stateful", "stateful-seedable", "by-hand"),
    "torchrelay": ("",),
}
# Training images, the first ones of Fashion-MNIST.
IMAGES = 4000
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """What to compare."""

    library: tuple[str, ...] = tuple(VARIANTS)
    """Libraries to compare."""
    variant: tuple[str, ...] = ()
    """Variants of the libraries; by default all."""
    ranks: tuple[int, ...] = (1, 2)
    """Numbers of ranks."""
    workers: tuple[int, ...] = (0, 2)
    """Numbers of loader workers."""
    randomness: bool = True
    """Augment and drop out; without it nothing but the order of the images is random."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A variant of a library, and how it is started."""

    library: str
    variant: str
    ranks: int
    workers: int
    randomness: bool

    def start(self, data: Path, directory: Path, *extra: str) -> subprocess.Popen[bytes]:
        """Start a run that writes into a directory, with one thread, in a process group of its own."""
        if self.library == "torchrelay":
            flags = {"epochs": EPOCHS, "batch-size": GLOBAL_BATCH, "lr": 0.05, "seed": SEED, "log-every": 30}
            target = ["-m", "training", *(f"--{name}={value}" for name, value in flags.items())]
            target += [f"--checkpoint-every={CHECKPOINT_EVERY}", f"--run-dir={directory}"]
            target += [f"--num-workers={self.workers}"]
        else:
            script = Path(__file__).with_name(f"{self.library}_run.py")
            target = [str(script), f"--out={directory / 'result.pt'}", f"--variant={self.variant}"]
            target += [f"--workers={self.workers}", *([] if self.randomness else ["--no-randomness"])]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        command = [sys.executable, *(launcher if self.ranks > 1 else []), *target, f"--data={data}", *extra]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        with directory.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip

    def run(self, data: Path, directory: Path, *extra: str) -> dict[str, Any]:
        """Run to the end, and return what was trained. Raises RuntimeError with the line that says why it failed."""
        if code := self.start(data, directory, *extra).wait(_TIMEOUT_SECONDS):
            lines = directory.with_suffix(".log").read_text(errors="replace").splitlines()
            raise RuntimeError(next((line for line in lines if "Error" in line), f"ended with {code}"))
        if self.library != "torchrelay":
            result: dict[str, Any] = torch.load(directory / "result.pt", weights_only=False)
            return result
        state = load_file(max((directory / "checkpoints").glob("step-*")) / "state.safetensors")
        optimizer = {name: value for name, value in state.items() if name.startswith("optimizer/")}
        model = load_file(directory / "final/model.safetensors")
        accuracy = json.loads((directory / "final/result.json").read_bytes())["test_accuracy"]
        return {"state": {"model": model, "optimizer": optimizer}, "accuracy": accuracy}

    def run_cut(self, data: Path, directory: Path) -> dict[str, Any]:
        """Run until it is killed after a checkpoint in the middle of an epoch, resume, and return what was trained."""
        own = self.library == "torchrelay"
        process = self.start(data, directory, *([] if own else [f"--until={CHECKPOINT_EVERY}"]))
        if own:
            checkpoint = directory / "checkpoints" / f"step-{CHECKPOINT_EVERY:08d}"
            while not checkpoint.exists() and process.poll() is None:
                time.sleep(0.002)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_TIMEOUT_SECONDS)
        if any((directory / name).exists() for name in ("final", "result.pt")):
            raise RuntimeError("ended before it could be cut")
        return self.run(data, directory, *([] if own else [f"--resume={CHECKPOINT_EVERY}"]))

    def compare(self, data: Path, directory: Path) -> Row:
        """Return the row of two whole runs and one that was cut."""
        row: dict[str, Any] = {
            "library, variant": f"{self.library} {self.variant}", "ranks": self.ranks, "workers": self.workers,
            "random": "all" if self.randomness else "order",
        }  # fmt: skip
        for name in ("whole", "again", "cut"):
            (directory / name).mkdir(parents=True)
        try:
            whole, again = (self.run(data, directory / name) for name in ("whole", "again"))
            resumed = self.run_cut(data, directory / "cut")
        except RuntimeError as error:
            return {**row, "whole = whole": str(error)}
        model, optimizer = (difference(whole["state"][key], resumed["state"][key]) for key in ("model", "optimizer"))
        repeats = difference(whole["state"], again["state"])[0] == 0
        return {
            **row, "whole = whole": "yes" if repeats else "NO",
            "resumed = whole": "**yes**" if model[0] == optimizer[0] == 0 else "no",
            "tensors that differ": f"{model[0]} of {model[1]}", "largest difference": f"{model[2]:.2g}",
            "optimizer: differ": f"{optimizer[0]} of {optimizer[1]}", "largest": f"{optimizer[2]:.2g}",
            "other order": others(whole, resumed, "labels"), "other images": others(whole, resumed, "images"),
            "accuracy whole": f"{whole['accuracy']:.2%}", "resumed": f"{resumed['accuracy']:.2%}",
        }  # fmt: skip


def tensors(tree: Any) -> Iterator[Tensor]:
    """Return all tensors in nested dictionaries and lists, in their order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(item)


def difference(left: Any, right: Any) -> tuple[int, int, float]:
    """Return how many tensors differ, of how many, and the largest absolute difference of two values in them."""
    pairs = list(zip(tensors(left), tensors(right), strict=True))
    gaps = [(a.double() - b.double()).abs().max().item() for a, b in pairs]
    return sum(not torch.equal(a, b) for a, b in pairs), len(pairs), max(gaps)


def others(whole: dict[str, Any], resumed: dict[str, Any], kind: str) -> str:
    """Return how many of the steps after the cut saw something else than in the whole run."""
    if kind not in whole:
        return "-"
    after = resumed[kind]
    return f"{sum(whole[kind].get(step) != seen for step, seen in after.items())} of {len(after)}"


def measure(options: Options) -> Findings:
    """Run everything that is asked for."""
    variants = [(library, variant) for library in options.library for variant in VARIANTS[library]]
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="exactness-") as directory:
        data = Path(directory, "data")
        data.mkdir()
        write_first(FASHION_MNIST_DIRECTORY, data, train=IMAGES, t10k=10_000)
        for (library, variant), ranks, workers in product(variants, options.ranks, options.workers):
            if not options.variant or variant in options.variant:
                case = Case(
                    library=library, variant=variant, ranks=ranks, workers=workers, randomness=options.randomness
                )
                rows.append(case.compare(data, Path(directory, str(len(rows)))))
                say(f"{library} {variant}, {ranks} ranks, {workers} workers: {rows[-1].get('resumed = whole')}")
    return Findings(tables={"rows": rows})


if __name__ == "__main__":
    small = {"variant": ("", "stateful"), "ranks": (1,), "workers": (0,)}
    benchmark("exactness", Options, measure, small=small, packages=("torch", "lightning", "accelerate", "torchdata"))
