"""Evaluates a model for `hpc evaluate`, from opening the model and the data to writing `final/`. Runs on every rank.

An interrupted evaluation starts again from its first image, because it writes its result only at the end.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torchrelay.saving.restoring import read_state
from torchrelay.stop_consensus import StepFlags, StopConsensus, StopRequested
from torchrelay.stop_signals import signals

from hpc.base.errors import UserError
from hpc.base.text import few
from hpc.run.events.kinds import FirstStep, TrainCompleted, TrainStarted, TrainStopped
from hpc.run.rundir import MODEL_CARD, MODEL_WEIGHTS
from training.config.dataset_layout import check_data, resolve_data
from training.config.evaluation_task import EvaluationTask, Split, choose_split
from training.config.train_config import TrainConfig
from training.data.build import load_data
from training.data.dataset import Data, ImageDataset, MemoryImages
from training.engine.shared_data import check_same, loader_workers, shared_file_index, user_paths
from training.evaluation.evaluator import Evaluation, Evaluator
from training.evaluation.validation import evaluate_and_log, numbers_of, tables_of
from training.inference.model_card import ModelCard, read_card
from training.models.factory import Preprocess, build_model, first_line, per_channel
from training.models.parallel import load_full_state_dict, place_model
from training.monitoring.run_logger import RunLogger
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext
from training.runtime.train_progress import Progress

# The parts of a checkpoint that hold weights. Evaluations prefer the moving average, so it is first.
_PARTS = ("ema/", "model/")


class EvaluationRun:
    """One rank's part in the evaluation of one model."""

    def __init__(self, context: RunContext, group: ProcessGroup, task: EvaluationTask) -> None:
        """Open the model and the data.

        Raises SharedError on every rank, if a rank cannot read the model or the data, or the data does not fit the
        model.
        """
        self._context, self._group, self._task = context, group, task
        with group.raise_on_all_ranks():
            self.logger = RunLogger(context.run_dir, context.attempt, writes=group.is_rank_zero)
        self._card, config, model, preprocess = load_model(context.run_dir.model, context.config, group)
        context.heartbeat.beat("start")
        self._split, data = open_data(context, group, task, self._card)
        with group.raise_on_all_ranks():
            self._source = fitting(getattr(data, self._split), data, self._card)
        self._evaluator = Evaluator(
            config=config,
            model=model,
            preprocess=preprocess,
            group=group,
            workers=0 if data.in_memory else loader_workers(context.config, data, group),
        )
        self._stop_consensus = StopConsensus(group.control)
        self._batches = 0

    def run(self) -> None:
        """Evaluate and write the result, unless all ranks agree to stop."""
        logger, card = self.logger, self._card
        logger.resume(Progress())
        started = TrainStarted(
            step=0,
            epoch=0,
            world_size=self._group.world_size,
            seconds=round(time.monotonic() - self._context.started, 3),
            restore_seconds=0.0,
            connect_seconds=round(self._group.connected_at - self._context.started, 3),
        )
        logger.event(started)
        logger.console.print(
            f"evaluating {self._task.source} on {len(self._source):,} images ({self._split}) of "
            f"{len(card.classes)} classes, {self._group.description}"
        )
        try:
            result = evaluate_and_log(
                self._evaluator, self._source, self._split, self._before_batch, logger,
                (self._task.step or 0, self._task.epoch or 0),
            )  # fmt: skip
            self._write(result)
        except StopRequested as request:
            seconds = round(time.monotonic() - (signals.received_at() or time.monotonic()), 3)
            self._context.heartbeat.beat("end")
            logger.event(TrainStopped(step=0, signal=request.name, seconds=seconds))
            logger.console.print(f"stopped by {request.name}: the next attempt evaluates from the first image on")
        logger.close()
        self._stop_consensus.wait()

    def _before_batch(self) -> None:
        """Exchange flags before a batch, so that a stop need not wait for the end of the evaluation."""
        self._context.heartbeat.beat("evaluate", self._batches)
        self._stop_consensus.exchange(StepFlags(signal=signals.received()))
        self._context.fault.inject("evaluate", self._batches, self._group.rank)
        if self._batches == 1:
            self.logger.event(FirstStep(step=0))
        self._batches += 1

    def _write(self, result: Evaluation) -> None:
        """Write `final/` without weights, because the weights belong to another run."""
        self._context.heartbeat.beat("end")
        classes = self._card.classes
        numbers = {
            **numbers_of(result),
            "split": self._split,
            "evaluation": asdict(self._task),
            "data": self._context.config.data,
            "corrupt_images": [self._source.name(index) for index in result.corrupt],
            "classes": list(classes),
            "made_from": dict(self._card.made_from),
            "world_size": self._group.world_size,
            "attempt": self._context.attempt,
        }
        self.logger.save_final({}, numbers, tables_of(result, classes) if self._group.is_rank_zero else {})
        self.logger.event(TrainCompleted(step=0))
        self.logger.console.print(
            f"{result.correct:,} of {result.total:,} correct: top-1 {result.accuracy:.2%}, top-5 "
            f"{result.top5_accuracy:.2%}, loss {result.loss:.4f}"
        )


def load_model(
    directory: Path, config: TrainConfig, group: ProcessGroup
) -> tuple[ModelCard, TrainConfig, nn.Module, Preprocess]:
    """Load the model in the directory that `hpc evaluate` has filled. All ranks must call this.

    Returns the model's card, the flags with its precision and strategy, the model, and what prepares its images.

    Raises SharedError on all ranks, if a file is damaged, or a rank's node lacks a package.
    """
    with group.raise_on_all_ranks():
        card = read_card((directory / MODEL_CARD).read_text(encoding="utf-8"), str(directory / MODEL_CARD))
        weights = _read_weights(directory)
        trained = card.config()
        same = {name: getattr(trained, name) for name in ("model", "head_hidden", "weights", "amp")}
        # The batch size of the training limits evaluation batches, and so affects the last bits.
        batch_size = card.made_from.get("config", {}).get("batch_size", config.batch_size)
        built = replace(config, batch_size=batch_size, **same)
        model = build_model(built, classes=len(card.classes), channels=card.channels, size=card.size)
    model = place_model(model, built, group)
    with group.raise_on_all_ranks():
        try:
            load_full_state_dict(model, weights.items())
        except RuntimeError as error:
            raise UserError(f"the weights in {directory} are not those of {card.model}: {first_line(error)}") from error
    preprocess = Preprocess(
        mean=per_channel(card.mean, group.device), std=per_channel(card.std, group.device),
        channels=card.channels, size=card.size, interpolation=card.interpolation,
    )  # fmt: skip
    return card, built, model, preprocess


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """Return a model's tensors by name, on the CPU, from its own file or a checkpoint."""
    try:
        if (directory / MODEL_WEIGHTS).exists():
            return load_file(directory / MODEL_WEIGHTS)
        state = read_state(directory)[0]
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{directory} cannot be loaded ({first_line(error)}): evaluate again") from error
    part = next(part for part in _PARTS if any(name.startswith(part) for name in state))
    return {name.removeprefix(part): value for name, value in state.items() if name.startswith(part)}


def open_data(context: RunContext, group: ProcessGroup, task: EvaluationTask, card: ModelCard) -> tuple[Split, Data]:
    """Open the data for a model, and choose the split to evaluate on. SharedError on every rank if one fails."""
    run_config = context.config
    # Other flags of a training concern augmentation and steps, which an evaluation does not have.
    config = TrainConfig(data=run_config.data, seed=run_config.seed, val_split=run_config.val_split)
    with group.raise_on_all_ranks(), user_paths(context):
        layout = check_data(resolve_data(config.data))
        split = choose_split(task, layout, config.val_split)
    file_index = shared_file_index(context, group, layout)
    with group.raise_on_all_ranks():
        data = load_data(config, layout, card.image_shape[1], file_index)
    check_same(data, group)
    return split, data


def fitting(source: ImageDataset | MemoryImages, data: Data, card: ModelCard) -> ImageDataset | MemoryImages:
    """Return the source with the model's class numbers as labels and, if images are read from files, the model's crop.

    Raises UserError if the model does not take images of this size or these channels, or does not know a class.
    """
    shape, wanted = (data.channels, *data.shape), " x ".join(map(str, card.image_shape))
    fits = data.channels in {1, card.image_shape[0]} if data.in_memory else shape == card.image_shape
    if not fits:
        has = " x ".join(map(str, shape)) if data.in_memory else "color images"
        raise UserError(f"--data has {has}, and the model takes images of {wanted} (channels x height x width)")
    labels = labels_of_model(source.labels, data.classes, card.classes)
    if isinstance(source, ImageDataset):
        return replace(source, labels=labels, crop_pct=card.crop_pct, interpolation=card.interpolation)
    return replace(source, labels=labels)


def labels_of_model(labels: Tensor, classes: tuple[str, ...], model_classes: tuple[str, ...]) -> Tensor:
    """Translate labels (int64 [n]) of `classes` into labels of `model_classes`, by the names of classes.

    IDX files name their classes by numbers. Such labels stay unchanged if data and model have equally many classes.
    Raises UserError if the model does not know a class.
    """
    numbers = tuple(map(str, range(len(model_classes))))
    if len(classes) == len(model_classes) and numbers in {classes, model_classes}:
        return labels
    if unknown := sorted(set(classes) - set(model_classes)):
        raise UserError(
            f"--data has classes that the model does not know: {few(unknown)}; it was trained on "
            f"{few(list(model_classes))}"
        )
    return torch.tensor([model_classes.index(name) for name in classes], dtype=torch.int64)[labels]
