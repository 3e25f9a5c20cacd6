"""How fast images come out of a loader: as tutorials write it, and this trainer's from JPEGs and from packed data.

    .venv/bin/python -m benchmarks.loader

Makes JPEGs like photographs (500 x 375 pixels, quality 92, about 100 KB) in a temporary directory, packs them, and
measures images per second with one loader process and with two, on two cores. All files are in the page cache, as they
are from the second epoch on where they fit into memory. The tutorials' loader is torchvision's ImageFolder with Pillow,
RandomResizedCrop(224), RandomHorizontalFlip, ToTensor and Normalize; ours crops parts of a quarter or more, as the
trainer does, mirrors, and leaves the normalisation to the GPU. The settings take turns, so that a machine which slows
down does so for all of them. Prints a table, and writes `benchmarks/results/loader.json`.
"""

import io
import itertools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console
from rich.table import Table
from torchvision import datasets, transforms

from benchmarks import record
from training.config.dataset_layout import check_data
from training.config.train_config import TrainConfig
from training.data.batch_schedule import make_schedule
from training.data.build import load_data
from training.data.loader import load_batches

SIZE, HEIGHT, WIDTH, QUALITY = 224, 375, 500, 92
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CLASSES = 10
# How many times as fast as the tutorials' each is meant to be.
GOALS = {"JPEG": 1.5, "packed": 5.0}
WORKERS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much to measure."""

    images: int = 2000
    """Names of images; a quarter of them are different images."""
    batch_size: int = 64
    rounds: int = 5
    """Measurements of each setting, the median of which counts."""
    write: bool = True
    """Write the JSON file."""


def photo(seed: int) -> bytes:
    """A JPEG of noise whose amplitudes fall with the frequency as those of photographs do."""
    random = np.random.default_rng(seed)
    down, across = np.fft.fftfreq(HEIGHT)[:, None] * HEIGHT, np.fft.rfftfreq(WIDTH) * WIDTH
    frequency = np.maximum(np.hypot(down, across), 1)
    waves = random.normal(size=(2, 3, *frequency.shape))
    noise = np.fft.irfft2((waves[0] + 1j * waves[1]) / frequency**1.3, s=(HEIGHT, WIDTH))
    noise *= np.array([55, 15, 15])[:, None, None] / noise.std(axis=(1, 2), keepdims=True)
    image = Image.fromarray(np.clip(128 + noise.transpose(1, 2, 0), 0, 255).astype(np.uint8), "YCbCr")
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def make_folder(root: Path, images: int, names: int = 4) -> float:
    """Class directories of JPEGs, each under so many names. Returns the mean size in bytes."""
    with ProcessPoolExecutor() as pool:
        contents = list(pool.map(photo, range(images // names), chunksize=8))
    for number in range(CLASSES):
        (root / f"{number}").mkdir(parents=True)
    for number, content in enumerate(contents):
        first = root / f"{number % CLASSES}" / f"{number}-0.jpg"
        first.write_bytes(content)
        for name in range(1, names):
            first.with_name(f"{number}-{name}.jpg").hardlink_to(first)
    return statistics.mean(map(len, contents))


def tutorial(folder: Path, options: Options, workers: int) -> Iterator[int]:
    """The sizes of batches as they come, from the loader of the tutorials."""
    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    dataset = datasets.ImageFolder(str(folder), transforms.Compose([*steps, transforms.Normalize(mean=MEAN, std=STD)]))
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        dataset, batch_size=options.batch_size, shuffle=True, num_workers=workers
    )
    for images, _labels in loader:
        yield len(images)


def ours(data: Path, options: Options, workers: int) -> Iterator[int]:
    """The same from this trainer's loader."""
    config = TrainConfig(data=str(data), val_split=0.0, image_size=SIZE)
    source = load_data(config, check_data(data), SIZE).train
    schedule = make_schedule(len(source), options.batch_size, 1, 0)
    with load_batches(source, schedule.requests(0, 0, 0, 1), workers, pin_memory=False) as batches:
        for batch in batches:
            yield len(batch.images)


@contextmanager
def on_two_cores() -> Iterator[list[int]]:
    """This process and those that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield sorted(before)[:2]
    os.sched_setaffinity(0, before)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One measurement."""

    images_per_second: float
    """From then on when each process has delivered what it had made before anybody asked."""
    cpu_ms: float
    """Milliseconds of processor time for an image, of all processes together: what other programs disturb least."""


def timed(batches: Iterator[int], workers: int) -> Speed:
    """All images of a loader, whose processes have ended after it."""
    cpu_before = cpu_seconds()
    first = sum(itertools.islice(batches, 3 * workers))
    began = time.perf_counter()
    rest = sum(batches)
    seconds = time.perf_counter() - began
    return Speed(images_per_second=rest / seconds, cpu_ms=1000 * (cpu_seconds() - cpu_before) / (first + rest))


def cpu_seconds() -> float:
    """Of this process and those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(root: Path, options: Options) -> dict[str, dict[int, list[Speed]]]:
    """The measurements, by setting and number of loader processes."""
    settings: dict[str, Callable[[int], Iterator[int]]] = {
        "tutorial": lambda workers: tutorial(root / "jpeg", options, workers),
        "JPEG": lambda workers: ours(root / "jpeg", options, workers),
        "packed": lambda workers: ours(root / "packed", options, workers),
    }
    found: dict[str, dict[int, list[Speed]]] = {name: {workers: [] for workers in WORKERS} for name in settings}
    for _, workers, name in itertools.product(range(options.rounds), WORKERS, settings):
        found[name][workers].append(timed(settings[name](workers), workers))
    return found


def report(found: dict[str, dict[int, list[Speed]]]) -> list[dict[str, Any]]:
    """A row for each setting and number of processes, with medians."""
    rows: list[dict[str, Any]] = []
    for workers, (name, by_workers) in itertools.product(WORKERS, found.items()):
        speeds = [speed.images_per_second for speed in by_workers[workers]]
        base = statistics.median(speed.images_per_second for speed in found["tutorial"][workers])
        rows.append(
            {
                "loader": name,
                "processes": workers,
                "images_per_second": round(statistics.median(speeds), 1),
                "least": round(min(speeds), 1),
                "most": round(max(speeds), 1),
                "cpu_ms_per_image": round(statistics.median(speed.cpu_ms for speed in by_workers[workers]), 3),
                "against_tutorial": round(statistics.median(speeds) / base, 2),
                "goal": GOALS.get(name),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*("" if value is None else f"{value}" for value in row.values()))
    Console().print(table)


def main() -> None:
    """Make, pack, measure, print."""
    options = tyro.cli(Options)
    measured_on = record.machine(("torch", "torchvision", "pillow"))
    with tempfile.TemporaryDirectory() as directory, on_two_cores() as cores:
        root = Path(directory)
        mean_bytes = make_folder(root / "jpeg", options.images)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "training.pack", root / "jpeg", root / "packed"], check=True)
        pack_seconds = time.perf_counter() - began
        # As many threads as a rank has.
        torch.set_num_threads(1)
        rows = report(measure(root, options))
    data = {"mean_bytes": round(mean_bytes), "width": WIDTH, "height": HEIGHT, "quality": QUALITY}
    show(rows)
    packed = {"seconds": round(pack_seconds, 1), "images_per_second": round(options.images / pack_seconds)}
    if options.write:
        settings = {"options": asdict(options), "images": data, "cores_used": cores, "packing": packed}
        record.write("loader", measured_on, rows, **settings)


if __name__ == "__main__":
    main()
