"""One part of `make gpu` in a process of its own, and what the parts do alike.

    python -m benchmarks.gpu.part stalls [--small] [--output FILE]

Each part is a module whose function `measure` returns the rows of a table and goals.
"""

import importlib
import os
import struct
import time
from argparse import ArgumentParser
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import table
from hpc.base.files import write_json
from training.config.dataset_layout import FASHION_MNIST, IDX_STEMS, check_data, resolve_data
from training.data.in_memory import read_idx_pair

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
    if few is None:
        return name
    layout = check_data(resolve_data(name))
    assert layout.test  # noqa: S101  # Fashion-MNIST has one
    for part, files, count in (("train", layout.train, 1024), ("test", layout.test, 256)):
        images, labels = read_idx_pair(files, part)
        header = struct.pack(">4i", 0x803, count, *images.shape[2:])
        (few / IDX_STEMS[f"{part}_images"]).write_bytes(header + images[:count].numpy().tobytes())
        header = struct.pack(">2i", 0x801, count)
        (few / IDX_STEMS[f"{part}_labels"]).write_bytes(header + labels[:count].to(torch.uint8).numpy().tobytes())
    return str(few)


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
