"""One part of `make gpu` in a process of its own, and what the parts do alike.

    python -m benchmarks.gpu.part stalls [--small] [--output FILE]

Each part is a module whose function `measure` returns the rows of a table and goals.
"""

import importlib
import os
import time
from argparse import ArgumentParser
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.fashion_mnist import write_first
from benchmarks.harness import table
from hpc.base.files import write_json
from training.config.dataset_layout import FASHION_MNIST, resolve_data

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal, and whether it was met."""

    name: str
    value: float | bool | None
    """What was measured; None: nothing."""
    goal: str
    met: bool | None
    """None: it was not measured, or not on a GPU."""


Found = tuple[list[Row], list[Goal]]


def goal(name: str, value: float | bool | None, text: str, *, met: bool) -> Goal:
    """Return a goal that only a GPU can meet or miss."""
    return Goal(name=name, value=value, goal=text, met=met if value is not None and on_gpu() else None)


def same_bits(name: str, same: bool) -> Goal:  # what was measured
    """Return the goal that two things are equal in every bit."""
    return goal(name, same, "the same bits", met=same)


def on_gpu() -> bool:
    """Return whether there is a GPU to measure."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Return the first GPU, or the CPU."""
    return torch.device("cuda", 0) if on_gpu() else torch.device("cpu")


def synchronize() -> float:
    """Wait for the GPU, and return the time."""
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def data_directory(few: Path | None = None) -> str:
    """Return Fashion-MNIST: that of the bundle (`make gpu-bundle`) or Debian's; or write some images to `few`."""
    bundle = os.environ.get("GPU_BUNDLE", "")
    name = str((Path(bundle) / FASHION_MNIST).absolute()) if bundle else FASHION_MNIST
    return name if few is None else str(write_first(resolve_data(name), few, train=1024, t10k=256))


def main() -> None:
    """Measure, print the table, and write the file."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("module")
    parser.add_argument("arguments", nargs="*", help="of its `measure`")
    parser.add_argument("--small", action="store_true", help="within seconds on a CPU, which says nothing of a GPU")
    parser.add_argument("--output", type=Path, help="the JSON file")
    options = parser.parse_args()
    measure = importlib.import_module(f"benchmarks.gpu.{options.module}").measure
    rows, goals = measure(*options.arguments, small=options.small)
    print(table(rows))
    if options.output:
        write_json(options.output, {"rows": rows, "goals": [asdict(each) for each in goals]})


if __name__ == "__main__":
    main()
