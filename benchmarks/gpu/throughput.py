"""Images per second of our training steps, against a loop by hand, torchvision's style and timm (../speed/loops.py).

The loops of a case train in turns in this process, so that a machine which slows down does so for all of them. Ours
runs as a user's would, repeatable by default; the others let cuDNN choose the fastest algorithms. With files the rivals
read JPEGs. What workers have made in advance is trained on before the clock starts.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
import tyro

from benchmarks.gpu.part import Goal, PartOptions, Row, finish, goal, on_gpu, synchronize
from benchmarks.loader import CLASSES, make_folder
from benchmarks.speed.loops import RIVALS, Case, Loop
from benchmarks.speed.our_loop import ours
from training.config.train_config import TrainConfig
from training.runtime.determinism import configure
from training.runtime.process_group import ProcessGroup, connect, disconnect
from training.runtime.run_context import rank_info_from

CaseName = Literal["resnet50", "resnet50-files", "resnet18-32px", "vit-b-16"]
OURS, SYNTHETIC, PACKED, JPEG = "ours", "synthetic", "packed", "JPEG files"
# A ratio this far below 1 is within the noise of a machine that others use.
_NOISE = 0.02
_PACKED_SHARE = 0.95


@dataclass(frozen=True, kw_only=True)
class Options(PartOptions):
    """What to measure."""

    case: CaseName = "resnet50"
    seconds: float = 2.0
    """Of each measurement."""
    rounds: int = 3
    """Measurements of each loop, the median of which counts."""
    images: int = 2000
    """Names of JPEGs; a quarter of them are different images."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A loop on images of one kind."""

    images: str
    name: str
    case: Case
    make: Callable[[], Iterator[None]]


def entries(options: Options, group: ProcessGroup, root: Path) -> list[Entry]:
    """All loops of a case."""
    cases: dict[CaseName, Case] = {
        "resnet50": Case(model="resnet50", image_size=224, batch_size=256),
        "resnet50-files": Case(model="resnet50", image_size=224, batch_size=128),
        "resnet18-32px": Case(model="resnet18", image_size=32, batch_size=512),
        "vit-b-16": Case(model="vit_b_16", image_size=224, batch_size=128, optimizer="adamw"),
    }
    case = cases[options.case]
    if options.small:
        case = replace(case, model="squeezenet1_1", image_size=64, batch_size=8, amp="none")

    def entry(images: str, case: Case, name: str = OURS) -> Entry:
        if name == OURS:
            return Entry(images=images, name=name, case=case, make=partial(ours, case, group, root / images))
        return Entry(images=images, name=name, case=case, make=partial(RIVALS[name], case, group.device))

    if options.case != "resnet50-files":
        return [entry(SYNTHETIC, case, name) for name in (OURS, *RIVALS)]
    make_folder(root / "jpeg", 80 if options.small else options.images)
    subprocess.run([sys.executable, "-m", "training.pack", root / "jpeg", root / "pack"], check=True)
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    files = replace(case, folder=root / "jpeg", workers=workers, classes=CLASSES)
    packed = replace(files, packed=root / "pack")
    return [entry(SYNTHETIC, case), entry(PACKED, packed), *(entry(JPEG, files, name) for name in (OURS, *RIVALS))]


def measure(options: Options, todo: list[Entry]) -> list[Row]:
    """Start the loops, let them take turns, and return a row for each."""
    started: list[tuple[Entry, Loop]] = []
    for entry in todo:
        try:
            loop = Loop(name=entry.name, steps=entry.make())
            loop.seconds_per_step = _first_steps(entry, loop)
        except ModuleNotFoundError as error:
            print(f"{entry.name} is left out: {error}")
            continue
        started.append((entry, loop))
    for _ in range(options.rounds):
        for entry, loop in started:
            _use(entry)
            _advance(loop, _made_in_advance(entry))
            steps = max(1, int(options.seconds / loop.seconds_per_step))
            loop.seconds_per_step = _advance(loop, steps) / steps
            loop.speeds.append(entry.case.batch_size / loop.seconds_per_step)
    return [_row(options, entry, loop) for entry, loop in started]


def _first_steps(entry: Entry, loop: Loop) -> float:
    """Make the first steps, and return the seconds of one; measure the memory that the loop takes."""
    _use(entry)
    before = torch.cuda.memory_allocated() if on_gpu() else 0
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    _advance(loop, 4 + _made_in_advance(entry))
    loop.memory_bytes = torch.cuda.max_memory_allocated() - before if on_gpu() else 0
    return _advance(loop, 4) / 4


def _made_in_advance(entry: Entry) -> int:
    """Batches that the workers of a loop have ready when its turn comes: torch's loader makes two each."""
    return 2 * entry.case.workers + 1


def _advance(loop: Loop, steps: int) -> float:
    began = synchronize()
    for _ in islice(loop.steps, steps):
        pass
    return synchronize() - began


def _use(entry: Entry) -> None:
    """Set torch up for one of the loops: the rivals let cuDNN choose the fastest algorithms."""
    configure(TrainConfig(synthetic=True, deterministic="warn" if entry.name == OURS else "off"))
    if entry.name == OURS and entry.case.model.startswith("vit"):
        torch.use_deterministic_algorithms(True)  # as configure_attention


def _row(options: Options, entry: Entry, loop: Loop) -> Row:
    return {
        "case": options.case,
        "images": entry.images,
        "loop": entry.name,
        "images_per_second": round(statistics.median(loop.speeds), 1),
        "least": round(min(loop.speeds), 1),
        "most": round(max(loop.speeds), 1),
        "peak_gib": round(loop.memory_bytes / 2**30, 2) if on_gpu() else None,
    }


def goals(options: Options, rows: list[Row]) -> list[Goal]:
    """Ours against the loop by hand and the fastest rival; packed against generated images."""
    speeds = {(row["images"], row["loop"]): row["images_per_second"] for row in rows}
    compared = JPEG if (JPEG, OURS) in speeds else SYNTHETIC
    mine = speeds[compared, OURS]
    rivals = [speed for (images, name), speed in speeds.items() if images == compared and name != OURS]
    ratios = {"the loop by hand": speeds[compared, "hand-written"], "the fastest rival": max(rivals)}
    found = [
        goal(
            f"{options.case}, {compared}: ours by {name}", round(mine / other, 3), ">= 1 within noise",
            met=mine / other >= 1 - _NOISE,
        )
        for name, other in ratios.items()
    ]  # fmt: skip
    if (PACKED, OURS) in speeds:
        share = speeds[PACKED, OURS] / speeds[SYNTHETIC, OURS]
        name = f"{options.case}: packed by synthetic"
        found.append(goal(name, round(share, 3), f">= {_PACKED_SHARE}", met=share >= _PACKED_SHARE))
    return found


def main() -> None:
    """Measure and print."""
    options = tyro.cli(Options)
    if options.small:
        options = replace(options, seconds=0.2, rounds=2)
    configure(TrainConfig(synthetic=True))
    group = connect(rank_info_from(os.environ))
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(options, entries(options, group, Path(directory)))
    finish(options, rows, goals(options, rows))
    disconnect()


if __name__ == "__main__":
    main()
