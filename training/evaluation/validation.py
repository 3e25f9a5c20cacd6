"""Validates a training after each epoch, tests it at the end, and makes `best/` and `final/`.

Runs on every rank; rank 0 writes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from hpc.run.events.kinds import TrainCompleted
from hpc.run.rundir import CLASSES, CONFUSION, MODEL_CARD
from training.checkpoint.state import TrainState
from training.data.dataset import Data, check_corrupt_limit
from training.data.loader import ImageSource
from training.evaluation.evaluator import Evaluation, Evaluator
from training.evaluation.final_files import classes_csv, confusion_csv, made_from
from training.inference.model_card import make_card
from training.models.parallel import full_state_dict
from training.monitoring.run_logger import RunLogger
from training.runtime.run_context import RunContext

# Fields of the best model's result that the final result includes.
_BEST_FIELDS = ("step", "epoch", "val_accuracy", "val_loss")
# With more classes, the matrix has millions of cells, nearly all zero; classes.csv has the relevant ones.
_MAX_CONFUSION_CLASSES = 2000
_TEST_FIELDS = ("accuracy", "top5_accuracy", "loss", "correct", "total")


@dataclass(frozen=True, kw_only=True)
class Validator:
    """Evaluates the model of a training, and writes the best and the final model."""

    context: RunContext
    evaluator: Evaluator
    data: Data
    state: TrainState
    corrupt_images: Sequence[int]
    """Indices of the unreadable training images met so far. The training changes the list."""
    logger: RunLogger

    def evaluate(self, source: ImageSource, split: str, before_batch: Callable[[], object]) -> Evaluation:
        """Evaluate the model on a split, and log and print the result."""
        progress = self.state.progress
        return evaluate_and_log(
            self.evaluator, source, split, before_batch, self.logger, (progress.step, progress.epoch)
        )

    def validate_if_due(self, before_batch: Callable[[], object]) -> Evaluation | None:
        """Validate after an epoch, and return the result for `record`, or None if no validation was due."""
        progress = self.state.progress
        if progress.evaluated_epochs == progress.epoch or self.data.val is None:
            return None
        return self.evaluate(self.data.val, "val", before_batch)

    def record(self, result: Evaluation) -> None:
        """Record a validation, and write `best/` if its accuracy is the highest so far."""
        progress = self.state.progress
        progress.val_loss, progress.val_accuracy = result.loss, result.accuracy
        if progress.best_accuracy is None or result.accuracy > progress.best_accuracy:
            progress.best_accuracy, progress.best_epoch = result.accuracy, progress.epoch
            self.logger.save_best(self._weights(), self._result(), self._card())
        progress.evaluated_epochs = progress.epoch

    def complete(self, before_batch: Callable[[], object], ended: str | None) -> None:
        """Test the model after the last step, and write `final/`. `ended` is why the training ended early, or None."""
        progress = self.state.progress
        test = self.evaluate(self.data.test, "test", before_batch) if self.data.test is not None else None
        best = self._test_best(test, before_batch)
        self.context.heartbeat.beat("end")
        result = {**numbers_of(test), "best": best, "ended": ended, **self._result()}
        tables = tables_of(test, self.data.classes) if test and self.evaluator.group.is_rank_zero else {}
        self.logger.save_final(self._weights(), result, self._card() | tables)
        self.logger.event(TrainCompleted(step=progress.step, ended=ended))
        outcome = f"test accuracy {test.accuracy:.2%}" if test else "no test set"
        if test and best and best["step"] != progress.step:
            outcome += f"; best model (epoch {best['epoch']}): {best['test_accuracy']:.2%}"
        self.logger.console.print(f"complete after {progress.step} steps: {outcome}")

    def _test_best(self, last: Evaluation | None, before_batch: Callable[[], object]) -> dict[str, Any] | None:
        """Test the best model, if any, and return its step, epoch and results, else None.

        `last` is the test of the model after the last step, which may be the best one.
        """
        progress, group = self.state.progress, self.evaluator.group
        if progress.best_accuracy is None:
            return None
        # Waiting for `best/` and loading it may take any time, unlike a batch, so change the heartbeat's phase.
        self.context.heartbeat.beat("end")
        weights, saved = self.logger.load_best() or ({}, None)
        best = group.all_gather_json({name: saved[name] for name in _BEST_FIELDS} if saved else None)[0]
        if best is None:
            return None
        test = last
        if self.data.test is not None and best["step"] != progress.step:
            self.state.wait_for_copies()
            received = self.context.beat_with_each("end", group.broadcast_tensors(weights))
            test = self.evaluator.evaluate_weights(received, self.data.test, before_batch)
        return {**best, **numbers_of(test)}

    def _weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights on rank 0's CPU, and an empty dict on other ranks. All ranks must call this."""
        tensors = full_state_dict(self.evaluator.model, self.evaluator.group)
        # safetensors writes contiguous tensors only.
        return {name: value.to("cpu", copy=True).contiguous() for name, value in tensors}

    def _result(self) -> dict[str, Any]:
        """Return the content of `result.json` without the results of the test."""
        config, progress, preprocess = self.context.config, self.state.progress, self.evaluator.preprocess
        size = {"channels": preprocess.channels, "size": preprocess.size}
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "val_accuracy": progress.val_accuracy,
            "val_loss": progress.val_loss,
            "best_val_accuracy": progress.best_accuracy,
            "weights": "moving average" if config.ema_decay else "last",
            "corrupt_images": [self.data.train.name(index) for index in self.corrupt_images],
            "classes": list(self.data.classes),
            "input": {**size, "mean": self.data.mean, "std": self.data.std},
            "config": asdict(config),
            "world_size": self.evaluator.group.world_size,
            "attempt": self.context.attempt,
        }

    @cached_property
    def _made_from(self) -> dict[str, Any]:
        return made_from(self.context, self.data, self.evaluator.group)

    def _card(self) -> dict[str, bytes]:
        """Return the content of `model.json` by its name, or an empty dict on ranks other than 0."""
        if not self.evaluator.group.is_rank_zero:
            return {}
        card = make_card(self.context.config, self.data, self.evaluator.preprocess, self._made_from)
        return {MODEL_CARD: card.to_json().encode()}


def evaluate_and_log(
    evaluator: Evaluator,
    source: ImageSource,
    split: str,
    before_batch: Callable[[], object],
    logger: RunLogger,
    model_after: tuple[int, int],
) -> Evaluation:
    """Evaluate a model, and log and print the result for `split`. `model_after` is the model's step and epoch.

    Raises SharedError if more images are corrupt than --max-corrupt-images allows.
    """
    began, console, (step, epoch) = time.monotonic(), logger.console, model_after
    result = evaluator.evaluate(source, before_batch)
    if result.corrupt:
        check_corrupt_limit(source, result.corrupt, evaluator.config.max_corrupt_images)
        names = ", ".join(map(source.name, result.corrupt))
        console.warn(f"{split}: other images replace {len(result.corrupt)} that cannot be read: {names}")
    record = {
        "step": step,
        "epoch": epoch,
        "split": split,
        "loss": round(result.loss, 6),
        "accuracy": result.accuracy,
        "top5_accuracy": result.top5_accuracy,
        "correct": result.correct,
        "total": result.total,
        "corrupt": len(result.corrupt),
        "seconds": round(time.monotonic() - began, 3),
    }

    def log() -> None:
        logger.log_metrics(record)
        console.print(f"epoch {epoch} {split} accuracy {result.accuracy:.2%} loss {result.loss:.4f}")

    logger.log_later(log)
    return result


def tables_of(test: Evaluation, classes: tuple[str, ...]) -> dict[str, bytes]:
    """Return the tables of an evaluation by the names of their files in `final/`."""
    tables = {CLASSES: classes_csv(test.labels, test.predicted, classes).encode()}
    if len(classes) <= _MAX_CONFUSION_CLASSES:
        tables[CONFUSION] = confusion_csv(test.labels, test.predicted, classes).encode()
    return tables


def numbers_of(test: Evaluation | None) -> dict[str, Any]:
    """Return accuracies, loss and counts of a test by their names in `result.json`. All are None without a test."""
    return {f"test_{name}": getattr(test, name, None) for name in _TEST_FIELDS}
