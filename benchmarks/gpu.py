"""How fast a GPU is fed: images per second of real training steps, by where the images come from.

    .venv/bin/python benchmarks/gpu.py
    torchrun --nproc-per-node 2 benchmarks/gpu.py

`synthetic` is the ceiling: generated images that lie on the device. `on the device` keeps all images there, `ahead` is
a loader whose batches are copied to the device while the step before computes, `in the step` one whose batches are
copied when the step asks for them. ResNet-20 trains on Fashion-MNIST, ResNet-50 on JPEGs like photographs (500 x 375
pixels, about 100 KB) and on the same packed; all files are in the page cache. The settings of a case take turns, so
that a machine which slows down does so for all of them. Before that, images that were made on the device are compared
with those of the CPU, bit by bit. Prints a table, and writes `benchmarks/results/gpu.json`.

Runs on a CPU too, where it says nothing of a GPU: `--small-model small-cnn --model squeezenet1_1 --images 80
--batch-size 8 --small-batch-size 64 --image-size 64 --seconds 1 --rounds 1 --amp none --output /tmp/gpu.json` shows in
a minute that it works.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from loader import hardware, make_folder
from rich.console import Console
from rich.table import Table

from hpc.core.files import write_json
from hpc.core.rundir import RunDir
from training.config.dataset_layout import check_data, resolve_data
from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchRequest
from training.data.build import load_data, move_to_device
from training.data.loader import Batch, ImageSource, load_batches, load_device_batches
from training.engine.launch import make_deterministic, make_trainer
from training.engine.trainer import Trainer
from training.runtime.process_group import ProcessGroup, connect, disconnect
from training.runtime.run_context import RunContext, rank_info_from

RESULTS = Path(__file__).parent / "results" / "gpu.json"
WARM_UP = 8
COMPARED = 64
# What is compared bit by bit, besides what is usual for the data.
AUGMENTATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"crop": "none", "flip": "on", "random_erasing": 0.5},
    {"crop": "padded", "flip": "on", "random_erasing": 0.5},
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, and how long."""

    seconds: float = 10.0
    """Of each measurement."""
    rounds: int = 3
    """Measurements of each setting, the median of which counts."""
    small_model: str = "resnet20"
    """For Fashion-MNIST."""
    small_batch_size: int = 512
    model: str = "resnet50"
    """For photographs."""
    batch_size: int = 256
    image_size: int = 224
    images: int = 4000
    """Names of JPEGs; a quarter of them are different images."""
    amp: Literal["none", "bf16", "fp16"] = "bf16"
    workers: int | None = None
    """Loader processes per rank; by default as many as the trainer would have."""
    output: Path = RESULTS
    """The JSON file."""


@dataclass(kw_only=True)
class Setting:
    """One way to feed one model."""

    case: str
    name: str
    config: TrainConfig
    ahead: bool = True
    trainer: Trainer = field(init=False)
    speeds: list[float] = field(default_factory=list)

    def batches(self) -> AbstractContextManager[Iterator[Batch]]:
        """The batches of the whole training."""
        trainer = self.trainer
        ranks, source = trainer.group, trainer.data.train
        requests = trainer.schedule.requests(0, 0, ranks.rank, ranks.world_size)
        if self.ahead:
            return load_device_batches(ranks.device, source, requests, trainer.workers)
        return load_batches(source, requests, trainer.workers, pin_memory=ranks.device.type == "cuda")


def settings(options: Options, jpegs: Path, packed: Path) -> list[Setting]:
    """All of them, those of a case together."""
    common = TrainConfig(
        data="fashion-mnist", epochs=10**6, val_split=0.0, amp=options.amp, lr=1e-4, num_workers=options.workers,
        data_on_device="off",
    )  # fmt: skip
    small = replace(common, model=options.small_model, batch_size=options.small_batch_size, image_size=28)
    large = replace(common, model=options.model, batch_size=options.batch_size, image_size=options.image_size)
    cases = {
        f"{options.small_model}, Fashion-MNIST": (small, True),
        f"{options.model}, packed": (replace(large, data=str(packed)), False),
        f"{options.model}, JPEGs": (replace(large, data=str(jpegs)), False),
    }
    return [setting for name, (config, fits) in cases.items() for setting in _of_case(name, config, fits=fits)]


def _of_case(case: str, config: TrainConfig, *, fits: bool) -> Iterator[Setting]:
    yield Setting(case=case, name="synthetic", config=replace(config, synthetic=True, data_on_device="on"))
    if fits:
        yield Setting(case=case, name="on the device", config=replace(config, data_on_device="on"))
    yield Setting(case=case, name="ahead", config=config)
    yield Setting(case=case, name="in the step", config=config, ahead=False)


def measure(setting: Setting, seconds: float) -> float:
    """Images per second of all ranks."""
    trainer = setting.trainer
    ranks = trainer.group
    with setting.batches() as batches:
        _train(trainer, batches, WARM_UP)
        first = _train(trainer, batches, WARM_UP) / WARM_UP
        # Every rank makes the same number of steps.
        steps = max(1, int(seconds / max(ranks.all_gather_json(first))))
        slowest = max(ranks.all_gather_json(_train(trainer, batches, steps)))
    return float(steps * trainer.schedule.batch_size / slowest)


def _train(trainer: Trainer, batches: Iterator[Batch], steps: int) -> float:
    """The seconds that so many steps take."""
    trainer.group.wait_for_device()
    began = time.perf_counter()
    for batch in islice(batches, steps):
        trainer.stepper.step(batch, trainer.loss_meter)
    trainer.group.wait_for_device()
    return time.perf_counter() - began


def compare(data: str, group: ProcessGroup, size: int) -> bool:
    """Whether images that were made on the device, and copies made ahead, are the CPU's in every bit."""
    same = True
    for options in AUGMENTATIONS:
        config = TrainConfig(data=data, val_split=0.0, image_size=size, data_on_device="on", **options)
        opened = load_data(config, check_data(resolve_data(data)), size)
        moved = move_to_device(config, opened, group.device)
        requests = [
            BatchRequest(indices=tuple(range(first, COMPARED, 4)), epoch=epoch)
            for first, epoch in enumerate([0, 1, None])
        ]
        for source in (moved.train, opened.train):
            same = same and _same(opened.train, source, requests, group.device)
    return same


def _same(one: ImageSource, other: ImageSource, requests: list[BatchRequest], device: torch.device) -> bool:
    with load_device_batches(device, other, requests, 0) as batches:
        pairs = [(one[request], batch) for request, batch in zip(requests, batches, strict=True)]
    return all(torch.equal(a, b.cpu()) for pair in pairs for a, b in zip(*pair, strict=True))


def machine(group: ProcessGroup) -> dict[str, Any]:
    """What it was measured on."""
    on_gpu = group.device.type == "cuda"
    return {
        **hardware(),
        "device": torch.cuda.get_device_name(group.device) if on_gpu else "cpu",
        "ranks": group.world_size,
        "cuda": torch.version.cuda if on_gpu else None,
        "usable_cores": len(os.sched_getaffinity(0)),
    }


def rows(done: list[Setting]) -> list[dict[str, Any]]:
    """A row for each setting."""
    ceilings = {setting.case: statistics.median(setting.speeds) for setting in done if setting.name == "synthetic"}
    return [
        {
            "case": setting.case,
            "images": setting.name,
            "images_per_second": round(statistics.median(setting.speeds), 1),
            "least": round(min(setting.speeds), 1),
            "most": round(max(setting.speeds), 1),
            "of_the_ceiling": round(statistics.median(setting.speeds) / ceilings[setting.case], 3),
            "workers": setting.trainer.workers,
        }
        for setting in done
    ]


def run(options: Options, group: ProcessGroup, jpegs: Path, packed: Path, runs: Path) -> dict[str, Any]:
    """Compare and measure; every rank does the same."""
    same = {"fashion-mnist": compare("fashion-mnist", group, 28)}
    todo = settings(options, jpegs, packed)
    for number, setting in enumerate(todo):
        context = RunContext(
            config=setting.config, run_dir=RunDir(runs / str(number)), attempt=1, started=time.monotonic()
        )
        setting.trainer = make_trainer(context, group)
        setting.trainer.stepper.warm_up(setting.trainer.data.channels, setting.trainer.data.size)
    for case in dict.fromkeys(setting.case for setting in todo):
        for _ in range(options.rounds):
            for setting in (each for each in todo if each.case == case):
                setting.speeds.append(measure(setting, options.seconds))
    return {"same_bits": same, "speeds": rows(todo)}


def show(found: dict[str, Any]) -> None:
    """Print what was found."""
    table = Table(*(name.replace("_", " ") for name in found["speeds"][0]))
    for row in found["speeds"]:
        table.add_row(*(f"{value}" for value in row.values()))
    Console().print(table)
    for name, same in found["same_bits"].items():
        print(
            f"{name}: images made on the device are {'the same as' if same else 'NOT those of'} the CPU's in every bit"
        )


def main() -> int:
    """Make, pack, measure, print."""
    options = tyro.cli(Options)
    make_deterministic(everything=False)
    group = connect(rank_info_from(os.environ))
    with tempfile.TemporaryDirectory() as directory:
        root = Path(group.all_gather_json(directory)[0])
        if group.is_rank_zero:
            make_folder(root / "jpeg", options.images)
            subprocess.run([sys.executable, "-m", "training.pack", root / "jpeg", root / "packed"], check=True)
        group.all_gather_json(None)
        found = run(options, group, root / "jpeg", root / "packed", root / "runs")
        group.all_gather_json(None)
    if group.is_rank_zero:
        show(found)
        told = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
        options.output.parent.mkdir(exist_ok=True)
        write_json(options.output, {"hardware": machine(group), "options": told, **found})
    disconnect()
    return 0 if all(found["same_bits"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
