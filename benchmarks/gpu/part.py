"""What every part of `make gpu` does alike: its flags, its table, its file of results."""

import os
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hpc.core.files import write_json
from training.config.dataset_layout import FASHION_MNIST, IDX_STEMS, check_data, resolve_data
from training.data.in_memory import read_idx_pair

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """The flags of a part."""

    small: bool = False
    """A form that ends within seconds on a CPU, and says nothing of a GPU."""
    output: Path | None = None
    """The JSON file."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal, and whether it was met."""

    name: str
    value: float | bool | None
    """What was measured; None: nothing."""
    goal: str
    met: bool | None
    """None: it was not measured, or not on a GPU."""


def goal(name: str, value: float | bool | None, text: str, *, met: bool) -> Goal:
    """A goal that only a GPU can meet or miss."""
    return Goal(name=name, value=value, goal=text, met=met if value is not None and on_gpu() else None)


def on_gpu() -> bool:
    """Whether there is a GPU to measure."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if on_gpu() else torch.device("cpu")


def synchronize() -> float:
    """Wait for the GPU, and return the time."""
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def finish(options: PartOptions, rows: Sequence[Row], goals: Sequence[Goal]) -> None:
    """Print the table, and write the file."""
    if rows:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = Table(*(name.replace("_", " ") for name in columns))
        for row in rows:
            table.add_row(*("" if row.get(name) is None else f"{row[name]}" for name in columns))
        Console(width=160).print(table)
    if options.output:
        write_json(options.output, {"rows": list(rows), "goals": [asdict(each) for each in goals]})


def data_directory(few: Path | None = None) -> str:
    """Fashion-MNIST: that of the bundle (`make gpu-bundle`), or Debian's; with `few`, some images, written there."""
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
