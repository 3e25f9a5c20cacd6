"""`python -m training.profile FLAGS...`: finds the bottleneck of a training, and the flag that changes it.

Runs under torchrun or alone, with the flags of the training, and measures its real parts. Leaves no files.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from hpc.core.errors import TorchrelayError, UserError
from hpc.core.program import INTERRUPTED
from hpc.core.rundir import RunDir
from training.config.command_line import RecipeName, parse_flags
from training.config.train_config import TrainConfig
from training.engine.launch import make_deterministic, make_trainer
from training.engine.trainer import Trainer
from training.profile.measure import Costs, Meter
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import RunContext, rank_info_from

# No training ends while it is being measured.
_EPOCHS = 10**6
# Loading overlaps with the steps. It limits them if it takes longer by this factor.
_LOADING_FACTOR = 1.1

# Each possible bottleneck: what it is, and what to change.
ADVICE = {
    "decode": (
        "reading and decoding images",
        "decode once: python -m training.pack DATA PACKED, then --data PACKED; or more cores for more --num-workers",
    ),
    "augment": (
        "cropping and augmenting",
        "more cores for more --num-workers, a smaller --image-size, or a cheaper --auto-augment",
    ),
    "loading": ("making batches", "more cores for more --num-workers"),
    "copy": (
        "copying to the GPU",
        "a smaller --image-size; for IDX and CIFAR files --data-on-device on",
    ),
    "compute": (
        "the model",
        "it does not wait for data: --amp bf16 on a GPU, --compile, a smaller --image-size or --model, or more GPUs",
    ),
    "all_reduce": (
        "exchanging gradients",
        "--compress-gradients bf16, a larger --batch-size or --grad-accum-steps, or fewer nodes on a slow network",
    ),
}

_ROWS = (
    ("step", "training step, everything"),
    ("loading", "loading a batch, alone"),
    ("decode", "  decoding"),
    ("augment", "  cropping and augmenting"),
    ("copy", "copying to the GPU"),
    ("compute", "forward, backward, optimizer"),
    ("all_reduce", "waiting for gradients of other ranks"),
)


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Find the bottleneck of a training, and the flag that changes it.

    Takes the flags of the training; runs under its torchrun, or alone. Measures the parts separately: the loader, steps
    on images that are already on the device, with and without the all-reduce of gradients, and complete steps. Exit
    codes: 0 done, 1 failed, 2 your mistake (one line says what to type).
    """

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    recipe: RecipeName = None
    config: Path | None = None
    """YAML file of flags. It overrides --recipe; the command line overrides both."""
    seconds: float = 5.0
    """Seconds for each measurement, of which there are at most seven."""
    json: bool = False
    """Print one JSON document, and nothing else, on stdout."""


def main() -> int:
    """Parse, measure and print; return the exit code. Rank 0 prints a mistake that all ranks find."""
    rank_info = rank_info_from(os.environ)
    try:
        options = parse_flags(ProfileOptions, sys.argv[1:], "python -m training.profile", prints=rank_info.is_rank_zero)
        if options.train.strategy == "fsdp":
            raise UserError("--strategy is fsdp, whose communication cannot be measured apart: leave --strategy out")
        if not options.seconds > 0:
            raise UserError(f"--seconds is {options.seconds:g}: use more than 0")
        profile(options)
    except TorchrelayError as error:
        if rank_info.is_rank_zero or not isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def profile(options: ProfileOptions) -> None:
    """Measure, and print the result on rank 0.

    Raises:
        UserError: a flag or the data do not suit.
        TorchrelayError: it failed.
    """
    config = replace(options.train, epochs=_EPOCHS)
    make_deterministic(everything=config.deterministic)
    group = connect(rank_info_from(os.environ))
    with tempfile.TemporaryDirectory(prefix="torchrelay-profile-") as directory:
        context = RunContext(config=config, run_dir=RunDir(Path(directory)), attempt=1, started=time.monotonic())
        trainer = make_trainer(context, group)
        result = report(trainer, Meter(trainer, options.seconds).costs())
        if group.is_rank_zero:
            print(json.dumps(result, indent=2)) if options.json else _print_table(result, group.description)
    disconnect()


def bottleneck(costs: Costs, workers: int) -> str:
    """The part that limits a step, a key of ADVICE.

    With loader workers, loading overlaps with the rest of the step and counts only if it takes longer. Without them the
    parts follow each other, and the longest counts.
    """
    parts = {"copy": costs.copy or 0.0, "compute": costs.compute, "all_reduce": costs.all_reduce or 0.0}
    if costs.loading <= (_LOADING_FACTOR * sum(parts.values()) if workers else max(parts.values())):
        return max(parts, key=lambda name: parts[name])
    inside = {"decode": costs.decode or 0.0, "augment": costs.augment or 0.0}
    largest = max(inside, key=lambda name: inside[name])
    # The rest of loading is the transfer of batches from the workers.
    return largest if inside[largest] > costs.loading / 3 else "loading"


def report(trainer: Trainer, costs: Costs) -> dict[str, Any]:
    """The result, ready for JSON."""
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
    sys.exit(main())
