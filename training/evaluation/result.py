"""What is told of a training: in a line when it begins, and in the files of its models. Pure."""

from dataclasses import asdict
from typing import Any

from torch import nn

from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchSchedule
from training.data.dataset import Data
from training.evaluation.evaluator import Evaluation
from training.models.factory import Preprocess
from training.runtime.process_group import ProcessGroup
from training.runtime.progress import Progress
from training.runtime.run_context import RunContext

_OF_TEST = ("accuracy", "top5_accuracy", "loss", "correct", "total")


def greeting(config: TrainConfig, data: Data, schedule: BatchSchedule, group: ProcessGroup, model: nn.Module) -> str:
    """What is about to be trained."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    held = ", which holds all images" if data.on_device else ""
    return (
        f"{config.model} ({weights:,} weights) on {len(data.train):,} images of {len(data.classes)} classes, "
        f"{schedule.total_steps} steps of {schedule.batch_size} images, "
        f"{group.world_size} ranks on {group.device.type}{held}"
    )


def describe(
    context: RunContext, data: Data, preprocess: Preprocess, progress: Progress, world_size: int
) -> dict[str, Any]:
    """What is known of the model as it is now."""
    return {
        "step": progress.step,
        "epoch": progress.epoch,
        "val_accuracy": progress.val_accuracy,
        "val_loss": progress.val_loss,
        "best_val_accuracy": progress.best_accuracy,
        "weights": "moving average" if context.config.ema_decay else "last",
        "corrupt_images": [data.train.name(index) for index in progress.corrupt],
        "classes": list(data.classes),
        "input": {"channels": preprocess.channels, "size": preprocess.size, "mean": data.mean, "std": data.std},
        "config": asdict(context.config),
        "world_size": world_size,
        "attempt": context.attempt,
    }


def describe_test(test: Evaluation | None) -> dict[str, Any]:
    """The numbers of a test; null where there was none."""
    return {f"test_{name}": getattr(test, name, None) for name in _OF_TEST}
