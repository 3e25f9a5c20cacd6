"""What the model is worth: the validation after each epoch, the test at the end, and what is written of both.

Runs on every rank; rank 0 writes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from hpc.core.errors import UserError
from hpc.core.files import read_json_lines
from hpc.core.rundir import CLASSES, CONFUSION, CONFUSION_PICTURE, HISTORY, MODEL_CARD, SAMPLES
from training.checkpoint.state import TrainState
from training.data.dataset import Data, ImageSource, check_corrupt_limit
from training.evaluation.class_tables import classes_csv, confusion_csv
from training.evaluation.evaluator import Evaluation, Evaluator
from training.evaluation.history import history_csv
from training.evaluation.picture import confusion_png
from training.evaluation.provenance import made_from
from training.evaluation.result import describe, describe_test
from training.evaluation.samples import samples_json
from training.inference.model_card import make_card
from training.models.parallel import full_state_dict
from training.monitoring.run_logger import RunLogger
from training.runtime.run_context import RunContext

# What is told of the best model beside its test.
_OF_BEST = ("step", "epoch", "val_accuracy", "val_loss")


@dataclass(frozen=True, kw_only=True)
class Validator:
    """Examines the model of a training, and keeps the best one and the last one."""

    context: RunContext
    evaluator: Evaluator
    data: Data
    state: TrainState
    logger: RunLogger

    def evaluate(self, source: ImageSource, split: str, before_batch: Callable[[], object]) -> Evaluation:
        """Evaluate and record it."""
        began, console = time.monotonic(), self.logger.console
        progress = self.state.progress
        result = self.evaluator.evaluate(source, before_batch)
        if result.corrupt:
            check_corrupt_limit(source, result.corrupt, self.context.config.max_corrupt_images)
            names = ", ".join(map(source.name, result.corrupt))
            console.warn(f"others take the place of {len(result.corrupt)} unreadable images in {split}: {names}")
        numbers = {"loss": round(result.loss, 6), "accuracy": result.accuracy, "top5_accuracy": result.top5_accuracy}
        counts = {"correct": result.correct, "total": result.total, "corrupt": len(result.corrupt)}
        seconds = time.monotonic() - began
        place = {"step": progress.step, "epoch": progress.epoch, "split": split}
        self.logger.log_evaluation(place | numbers | counts | {"seconds": round(seconds, 3)})
        console.print(f"epoch {progress.epoch} {split} accuracy {result.accuracy:.2%} loss {result.loss:.4f}")
        return result

    def validate_if_due(self, before_batch: Callable[[], object]) -> Evaluation | None:
        """After an epoch, validate, and keep the model if it is the best so far. None: nothing was to be validated."""
        progress = self.state.progress
        if progress.evaluated_epochs == progress.epoch or self.data.val is None:
            return None
        result = self.evaluate(self.data.val, "val", before_batch)
        progress.val_loss, progress.val_accuracy = result.loss, result.accuracy
        if progress.best_accuracy is None or result.accuracy > progress.best_accuracy:
            progress.best_accuracy, progress.best_epoch = result.accuracy, progress.epoch
            self.logger.save_best(self.weights(), self.result(), self.card())
        progress.evaluated_epochs = progress.epoch
        return result

    def weights(self) -> dict[str, Tensor]:
        """On rank 0 a copy of the model's weights in the host's memory, under the names of the model's own code.

        All ranks must call this.
        """
        tensors = full_state_dict(self.evaluator.model, self.evaluator.group, sharded=self.state.sharded)
        # A file holds tensors whose numbers lie in the order of their dimensions.
        return {name: value.to("cpu", copy=True).contiguous() for name, value in tensors}

    def result(self) -> dict[str, Any]:
        """What is known of the model as it is now."""
        evaluator, world_size = self.evaluator, self.evaluator.group.world_size
        return describe(self.context, self.data, evaluator.preprocess, self.state.progress, world_size)

    def complete(self, before_batch: Callable[[], object], ended: str | None) -> None:
        """Test the model as it is after the last step, and write `final/`.

        Args:
            before_batch: is called before every batch.
            ended: why that was before the last epoch's end; None: it was not.
        """
        test = self.evaluate(self.data.test, "test", before_batch) if self.data.test is not None else None
        best = self.test_best(test, before_batch)
        result = {**describe_test(test), "best": best, "ended": ended, **self.result()}
        self.context.heartbeat.beat("end")
        files = self.card() | self.history() | (self.told(test) if test else {})
        self.logger.save_final(self.weights(), result, files)
        self.logger.event("train_completed", step=self.state.progress.step, ended=ended)
        known = f"test accuracy {test.accuracy:.2%}" if test else "there is no test set"
        if test and best and best["step"] != self.state.progress.step:
            known += f", and {best['test_accuracy']:.2%} of the best model, that of epoch {best['epoch']}"
        self.logger.console.print(f"complete after {self.state.progress.step} steps: {known}")

    def test_best(self, last: Evaluation | None, before_batch: Callable[[], object]) -> dict[str, Any] | None:
        """Test the model that did best in validation, and add that to `best/`.

        Args:
            last: the test of the model after the last step, which may be the best one.
            before_batch: is called before every batch.

        Returns:
            Which one it is, and its test; None: there is none.
        """
        progress, ranks = self.state.progress, self.evaluator.group
        if progress.best_accuracy is None:
            return None
        weights, known = self.logger.load_best() or ({}, None)
        best = ranks.all_gather_object({name: known[name] for name in _OF_BEST} if known else None)[0]
        if best is None:
            return None
        test = last
        if self.data.test is not None and best["step"] != progress.step:
            weights = load(ranks.broadcast_bytes(save(weights) if ranks.is_rank_zero else None))
            self.state.wait_for_copies()
            test = self.evaluator.evaluate_other(weights, self.data.test, before_batch)
        self.logger.add_best_test(describe_test(test))
        return {**best, **describe_test(test)}

    @cached_property
    def _origin(self) -> dict[str, Any]:
        return made_from(self.context, self.data, self.evaluator.group)

    def card(self) -> dict[str, bytes]:
        """The file that says how to build the model and how to make images ready for it, by its name."""
        if not self.evaluator.group.is_rank_zero:
            return {}
        card = make_card(self.context.config, self.data, self.evaluator.preprocess, self._origin)
        return {MODEL_CARD: card.to_json().encode()}

    def history(self) -> dict[str, bytes]:
        """The file with a line for each epoch, by its name."""
        if not self.evaluator.group.is_rank_zero:
            return {}
        run = self.context.run_dir
        return {HISTORY: history_csv(*map(read_json_lines, (run.train_metrics, run.eval_metrics))).encode()}

    def told(self, test: Evaluation) -> dict[str, bytes]:
        """The files that tell more of a test, by their names."""
        if self.data.test is None or not self.evaluator.group.is_rank_zero:
            return {}
        classes = self.data.classes
        tables = {
            CONFUSION: confusion_csv(test.confusion, classes).encode(),
            CLASSES: classes_csv(test.confusion, classes).encode(),
            CONFUSION_PICTURE: confusion_png(test.confusion, classes),
        }
        try:
            return {**tables, SAMPLES: samples_json(self.data.test, test, classes).encode()}
        except UserError as error:
            # Another rank had read it. A finished training is worth more than its pictures.
            self.logger.console.warn(f"there will be no sample predictions: {error}")
            return tables
