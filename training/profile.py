"""`python -m training.profile FLAGS...`: finds the bottleneck of a training, and the flag that changes it.

Runs under torchrun or alone, with the flags of the training. It times each part of a step by repeating only that part.
All ranks repeat it equally often, because a step needs all ranks. The slowest rank's time counts. No files remain.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hpc.base import program
from hpc.base.errors import UserError
from hpc.run.rundir import RunDir
from training.config.command_line import TrainFlags, parse_flags
from training.data.batch_schedule import BatchRequest
from training.data.dataset import ImageDataset
from training.data.image_folder import FolderImages
from training.data.loader import Batch, load_batches, load_device_batches
from training.engine.launch import make_trainer
from training.engine.trainer import Trainer
from training.models.parallel import postpone_reduction
from training.runtime.determinism import configure
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import RunContext, rank_info_from

# Number of epochs, large enough that no training ends while it is measured.
_EPOCHS = 10**6
# With loader workers, loading is the bottleneck if it takes more than this many times as long as the other parts.
_LOADING_FACTOR = 1.1
_MAX_REPETITIONS = 500
# Limit on the images of a batch that this process decodes and augments for a measurement.
_MAX_IMAGES = 64

# For each possible bottleneck, a description and what to change.
ADVICE = {
    "decode": (
        "reading, decoding and cropping images",
        "decode once: hpc pack DATA PACKED, then --data PACKED; or use more cores and a larger --num-workers",
    ),
    "augment": (
        "cropping and augmenting",
        "more cores and a larger --num-workers, a smaller --image-size, or a cheaper --auto-augment",
    ),
    "loading": ("making batches", "more cores and a larger --num-workers"),
    "copy": (
        "copying to the GPU",
        "a smaller --image-size",
    ),
    "compute": (
        "the model",
        "loading is fast enough; use --amp bf16 on a GPU, --compile, a smaller --image-size or --model, or more GPUs",
    ),
    "all_reduce": (
        "exchanging gradients",
        "--compress-gradients bf16, a larger --batch-size or --grad-accum-steps, or fewer nodes on a slow network",
    ),
}

_ROWS = (
    ("step", "training step, everything"),
    ("loading", "loading a batch, alone"),
    ("decode", "  decoding and cropping"),
    ("augment", "  augmenting (of packed images, also cropping)"),
    ("copy", "copying to the GPU"),
    ("compute", "forward, backward, optimizer"),
    ("all_reduce", "waiting for gradients of other ranks"),
)


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(TrainFlags):
    """Find the bottleneck of a training, and the flag that changes it.

    Takes the flags of hpc train; runs under torchrun or alone. Measures the parts separately: the loader, steps
    on images that are already on the device, with and without the all-reduce of gradients, and complete steps. Exit
    codes: 0 done, 1 failed, 2 your mistake (one line says what to type).
    """

    seconds: float = 5.0
    """Seconds for each measurement, of which there are at most seven."""
    json: bool = False
    """Print one JSON document, and nothing else, on stdout."""


def main() -> int:
    """Run the program, and return its exit code. All ranks raise a UserError, and rank 0 prints it."""
    try:
        profile(parse_flags(ProfileOptions, sys.argv[1:], program.called("training.profile")))
    except UserError as error:
        if rank_info_from(os.environ).is_rank_zero:
            raise
        return error.exit_code
    return 0


def profile(options: ProfileOptions) -> None:
    """Measure the parts of a step, and print the result on rank 0.

    Raises UserError if a flag or the data is wrong, or TorchrelayError if the training failed.
    """
    if options.train.strategy == "fsdp":
        raise UserError("--strategy is fsdp, whose communication cannot be measured alone: leave --strategy out")
    if not options.seconds > 0:
        raise UserError(f"--seconds is {options.seconds:g}: use more than 0")
    config = replace(options.train, epochs=_EPOCHS, initial_image_size=None)
    configure(config)
    group = connect(rank_info_from(os.environ))
    with tempfile.TemporaryDirectory(prefix="torchrelay-profile-") as directory:
        context = RunContext(config=config, run_dir=RunDir(Path(directory)), attempt=1, started=time.monotonic())
        trainer = make_trainer(context, group)
        result = report(trainer, Meter(trainer, options.seconds).costs())
        if group.is_rank_zero:
            program.print_json(result) if options.json else _print_table(result, group.description)
    disconnect()


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Milliseconds per step of the slowest rank; None: the training has no such part."""

    step: float
    loading: float
    """A batch from all loader workers together, without training."""
    decode: float | None
    """Reading, decoding and cropping the images of a batch, divided by the workers; a part of `loading`."""
    augment: float | None
    """Augmenting these, and cropping packed images, divided by the workers; a part of `loading`."""
    copy: float | None
    compute: float
    """Forward and backward passes and the optimizer, on images that are already on the device."""
    all_reduce: float | None
    """The part of the gradients' all-reduce that does not overlap with `compute`."""


class Meter:
    """Measures the parts of a training's steps."""

    def __init__(self, trainer: Trainer, seconds: float) -> None:
        self.trainer, self.group, self._seconds = trainer, trainer.group, seconds

    def costs(self) -> Costs:
        """Return the costs of all parts. All ranks must call this."""
        trainer, device = self.trainer, self.group.device
        source, workers = trainer.data.train, trainer.workers
        trainer.stepper.warm_up(trainer.data.channels, trainer.data.size)
        pin_memory = device.type == "cuda" and workers > 0
        with load_batches(source, self._requests(), workers, pin_memory=pin_memory) as batches:
            loading = self._milliseconds(lambda: next(batches))
            batch = next(batches)
        copy = self._milliseconds(lambda: batch.to(device)) if device != batch.images.device else None
        ready = batch.to(device)
        synchronised = self._milliseconds(lambda: self._step(ready)) if self.group.world_size > 1 else None
        with postpone_reduction(trainer.stepper.wrapped):
            compute = self._milliseconds(lambda: self._step(ready))
        with load_device_batches(device, source, self._requests(), workers) as batches:
            step = self._milliseconds(lambda: self._step(next(batches)))
        # Scale decoding and augmenting to a rank's share of a batch, divided by its workers.
        share, indices = len(batch.labels) / max(1, workers), tuple(batch.indices[:_MAX_IMAGES].tolist())
        request = BatchRequest(indices=indices, epoch=0)
        decode, augment = None, self._milliseconds(lambda: source[request]) * share / len(indices)
        if isinstance(source, ImageDataset) and isinstance(source.store, FolderImages):
            store, crops = source.store, cycle([(index, source.crop(0, index)) for index in indices])
            decode = self._milliseconds(lambda: store.read(*next(crops))) * share
            augment = max(0.0, augment - decode)
        return Costs(
            step=step,
            loading=loading,
            decode=decode,
            augment=augment,
            copy=copy,
            compute=compute,
            all_reduce=None if synchronised is None else max(0.0, synchronised - compute),
        )

    def _requests(self) -> Iterator[BatchRequest]:
        return self.trainer.schedule.requests(0, 0, self.group.rank, self.group.world_size)

    def _step(self, batch: Batch) -> None:
        self.trainer.stepper.step(batch, self.trainer.loss_meter)

    def _milliseconds(self, work: Callable[[], Any]) -> float:
        """Return the mean milliseconds of `work` on the slowest rank. Repeats `work` as often as fits into --seconds.

        The first repetition does not count, because it allocates and compiles what later ones reuse.
        """
        for _ in range(2):
            once = self._total_seconds(work, 1)
        repetitions = int(min(_MAX_REPETITIONS, self._seconds / max(self.group.all_gather_json(once))))
        seconds = self._total_seconds(work, repetitions) / repetitions if repetitions > 1 else once
        return 1000 * float(max(self.group.all_gather_json(seconds)))

    def _total_seconds(self, work: Callable[[], Any], repetitions: int) -> float:
        self.group.wait_for_device()
        began = time.perf_counter()
        for _ in range(repetitions):
            work()
        self.group.wait_for_device()
        return time.perf_counter() - began


def bottleneck(costs: Costs, workers: int) -> str:
    """Return the part that limits a step, as a key of ADVICE.

    With loader workers, loading runs at the same time as the other parts, and is the bottleneck only if it takes longer
    than all of them together. Without workers, the parts follow each other, and the longest part is the bottleneck.
    """
    parts = {"copy": costs.copy or 0.0, "compute": costs.compute, "all_reduce": costs.all_reduce or 0.0}
    if costs.loading <= (_LOADING_FACTOR * sum(parts.values()) if workers else max(parts.values())):
        return max(parts, key=lambda name: parts[name])
    inside = {"decode": costs.decode or 0.0, "augment": costs.augment or 0.0}
    largest = max(inside, key=lambda name: inside[name])
    # If neither takes a third of the loading time, joining images to batches and transferring them takes more.
    return largest if inside[largest] > costs.loading / 3 else "loading"


def report(trainer: Trainer, costs: Costs) -> dict[str, Any]:
    """Return the costs, the bottleneck and advice, ready for JSON."""
    part = bottleneck(costs, trainer.workers)
    description, advice = ADVICE[part]
    return {
        "model": trainer.config.model,
        "batch_size": trainer.schedule.batch_size,
        "world_size": trainer.group.world_size,
        "device": trainer.group.device.type,
        "workers": trainer.workers,
        "images_per_second": round(trainer.schedule.batch_size / costs.step * 1000, 1),
        "milliseconds": {name: None if value is None else round(value, 3) for name, value in asdict(costs).items()},
        "bottleneck": part,
        "description": description,
        "advice": advice,
    }


def _print_table(result: dict[str, Any], ranks: str) -> None:
    workers = f"{result['workers']} loader workers per rank"
    print(f"{result['model']}, {result['batch_size']} images per step, {ranks}, {workers}")
    table = Table(box=None, header_style="bold")
    table.add_column("part")
    table.add_column("ms per step", justify="right")
    table.add_column("images/s", justify="right")
    for name, text in _ROWS:
        if value := result["milliseconds"][name]:
            table.add_row(text, f"{value:.2f}", f"{result['batch_size'] / value * 1000:,.0f}")
    Console().print(table)
    print(f"bottleneck: {result['description']}\nto change it: {result['advice']}")


if __name__ == "__main__":
    sys.exit(program.run(main, words=sys.argv if rank_info_from(os.environ).is_rank_zero else ()))
