"""`python -m training.profile FLAGS...`: which part of a training is the bottleneck, and which flag to change.

Under torchrun or alone, with the flags of the training, by real runs of its parts. Writes nothing that stays.
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
# A part that takes this much of a step in spite of the others running beside it is what the step waits for.
_MUCH_LONGER = 1.1

# What can be the bottleneck, what it is, and the flags that change it.
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


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Say which part of a training is the bottleneck, and which flag to change.

    Takes the training's own flags, under the torchrun of the training or alone. Each part is done alone for a while:
    the loader, the steps on images that are on the device already, with and without the exchange of gradients, and all
    together. Exit code 0: it is told; 1: it failed, 2: your mistake (one line says what to type).
    """

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    recipe: RecipeName = None
    config: Path | None = None
    """YAML file of flags. It overrides --recipe; the command line overrides both."""
    seconds: float = 5.0
    """How long each of the parts is measured; there are seven at most."""
    json: bool = False
    """Print one JSON document, and nothing else, on stdout."""


def main() -> int:
    """Parse, measure, print, and turn errors into one line and an exit code."""
    rank_info = rank_info_from(os.environ)
    try:
        arguments = parse_flags(
            ProfileOptions, sys.argv[1:], "python -m training.profile", prints=rank_info.is_rank_zero
        )
        if arguments.train.strategy == "fsdp":
            raise UserError("--strategy is fsdp, whose exchange has no end apart from its steps: leave it out here")
        if not arguments.seconds > 0:
            raise UserError(f"--seconds is {arguments.seconds:g}: use more than 0")
        profile(arguments)
    except TorchrelayError as error:
        if rank_info.is_rank_zero or not isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def profile(arguments: ProfileOptions) -> None:
    """Measure, and print what was found on rank 0.

    Raises:
        UserError: a flag or the data do not suit.
        TorchrelayError: it failed.
    """
    config = replace(arguments.train, epochs=_EPOCHS)
    make_deterministic(everything=config.deterministic)
    group = connect(rank_info_from(os.environ))
    with tempfile.TemporaryDirectory(prefix="torchrelay-profile-") as directory:
        context = RunContext(config=config, run_dir=RunDir(Path(directory)), attempt=1, started=time.monotonic())
        trainer = make_trainer(context, group)
        costs = Meter(trainer, arguments.seconds).costs()
        if group.is_rank_zero:
            _print_json(trainer, costs) if arguments.json else _print_table(trainer, costs)
    disconnect()


def bottleneck(costs: Costs, workers: int) -> str:
    """The part that a step waits for, a key of ADVICE.

    Loader workers work beside the steps. If a batch takes longer than all that a step does with it, it is the loader;
    of that, the larger part. Else it is the largest part of the step. Without workers one comes after the other, and
    the larger counts.
    """
    parts = {"copy": costs.copy or 0.0, "compute": costs.compute, "all_reduce": costs.all_reduce or 0.0}
    bearable = _MUCH_LONGER * sum(parts.values()) if workers else max(parts.values())
    if costs.loading > bearable:
        inside = {"decode": costs.decode or 0.0, "augment": costs.augment or 0.0}
        largest = max(inside, key=lambda name: inside[name])
        # What the workers do is not all: their batches have to come over, too.
        return largest if inside[largest] > costs.loading / 3 else "loading"
    return max(parts, key=lambda name: parts[name])


def report(trainer: Trainer, costs: Costs) -> dict[str, Any]:
    """What was found, ready for JSON."""
    part = bottleneck(costs, trainer.workers)
    what, advice = ADVICE[part]
    return {
        "model": trainer.config.model,
        "batch_size": trainer.schedule.batch_size,
        "world_size": trainer.group.world_size,
        "device": trainer.group.device.type,
        "workers": trainer.workers,
        "images_per_second": round(trainer.schedule.batch_size / costs.whole * 1000, 1),
        "milliseconds": {name: None if value is None else round(value, 3) for name, value in asdict(costs).items()},
        "bottleneck": part,
        "is": what,
        "advice": advice,
    }


def _print_json(trainer: Trainer, costs: Costs) -> None:
    print(json.dumps(report(trainer, costs), indent=2))


_ROWS = (
    ("whole", "a step, all together"),
    ("loading", "batches from the loader alone"),
    ("decode", "  decoding"),
    ("augment", "  cropping and augmenting"),
    ("copy", "copying to the GPU"),
    ("compute", "forward, backward, optimizer"),
    ("all_reduce", "waiting for gradients of other ranks"),
)


def _print_table(trainer: Trainer, costs: Costs) -> None:
    found = report(trainer, costs)
    table = Table(box=None, header_style="bold")
    table.add_column("part")
    table.add_column("ms per step", justify="right")
    table.add_column("images/s", justify="right")
    for name, text in _ROWS:
        if value := found["milliseconds"][name]:
            table.add_row(text, f"{value:.2f}", f"{found['batch_size'] / value * 1000:,.0f}")
    ranks = f"ranks on {found['device']}: {found['world_size']}, loader workers of each: {found['workers']}"
    print(f"{found['model']}, {found['batch_size']} images a step, {ranks}")
    Console().print(table)
    print(f"bottleneck: {found['is']}\nto change it: {found['advice']}")


if __name__ == "__main__":
    sys.exit(main())
