"""What the model is worth: the validation after each epoch, the test at the end, and what is written of both.

Runs on every rank; rank 0 writes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpc.errors import UserError
from hpc.rundir import CONFUSION, SAMPLES
from training.corrupt import check_limit
from training.data import Data, Source
from training.evaluate import Evaluation, Evaluator, confusion_csv
from training.job import Job
from training.recorder import Recorder
from training.result import describe
from training.samples import samples_json
from training.schedule import follow_plateau
from training.state import TrainState
from training.window import Window


@dataclass(frozen=True, kw_only=True)
class Examiner:
    """Examines the model of a training, and keeps the best one and the last one."""

    job: Job
    evaluator: Evaluator
    data: Data
    state: TrainState
    recorder: Recorder
    window: Window

    def evaluate(self, source: Source, split: str, before_batch: Callable[[], object]) -> Evaluation:
        """Evaluate and record it."""
        began, console = time.monotonic(), self.recorder.console
        progress = self.state.progress
        result = self.evaluator.evaluate(source, before_batch)
        if result.corrupt:
            check_limit(source, result.corrupt, self.job.config.max_corrupt)
            names = ", ".join(map(source.name, result.corrupt))
            console.warn(f"others take the place of {len(result.corrupt)} unreadable images in {split}: {names}")
        numbers = {"loss": round(result.loss, 6), "accuracy": result.accuracy}
        counts = {"correct": result.correct, "total": result.total, "corrupt": len(result.corrupt)}
        place = {"step": progress.step, "epoch": progress.epoch, "split": split}
        self.recorder.evaluation(place | numbers | counts)
        console.say(f"epoch {progress.epoch} {split} accuracy {result.accuracy:.2%} loss {result.loss:.4f}")
        self.window.leave_out(time.monotonic() - began)
        return result

    def validate_if_due(self, before_batch: Callable[[], object]) -> None:
        """After an epoch, validate, and keep the model if it is the best so far."""
        progress = self.state.progress
        if progress.evaluated_epochs == progress.epoch or self.data.val is None:
            return
        result = self.evaluate(self.data.val, "val", before_batch)
        progress.val_loss, progress.val_accuracy = result.loss, result.accuracy
        follow_plateau(self.job.config, progress, result.loss)
        if progress.best_accuracy is None or result.accuracy > progress.best_accuracy:
            progress.best_accuracy, progress.best_epoch = result.accuracy, progress.epoch
            self.recorder.best(self.weights(), self.result())
        progress.evaluated_epochs = progress.epoch

    def weights(self) -> dict[str, Tensor]:
        """A copy of the model's weights in the host's memory, under the names that the model's own code gives them."""
        if not self.evaluator.ranks.leads:
            return {}
        return {name: value.to("cpu", copy=True) for name, value in self.evaluator.model.state_dict().items()}

    def result(self) -> dict[str, Any]:
        """What is known of the model as it is now."""
        evaluator, world_size = self.evaluator, self.evaluator.ranks.world_size
        return describe(self.job, self.data, evaluator.preprocess, self.state.progress, world_size)

    def complete(self, before_batch: Callable[[], object], ended: str | None) -> None:
        """Test the model as it is after the last step, and write `final/`.

        Args:
            before_batch: is called before every batch.
            ended: why that was before the last epoch's end; None: it was not.
        """
        test = self.evaluate(self.data.test, "test", before_batch) if self.data.test is not None else None
        result = {
            "test_accuracy": test.accuracy if test else None,
            "test_loss": test.loss if test else None,
            "test_correct": test.correct if test else None,
            "test_total": test.total if test else None,
            "ended": ended,
            **self.result(),
        }
        self.job.heartbeat.beat("end")
        self.recorder.final(self.weights(), result, self.told(test) if test else {})
        self.recorder.event("train_completed", step=self.state.progress.step, ended=ended)
        known = f"test accuracy {test.accuracy:.2%}" if test else "there is no test set"
        self.recorder.console.say(f"complete after {self.state.progress.step} steps: {known}")

    def told(self, test: Evaluation) -> dict[str, str]:
        """The files that tell more of a test, by their names."""
        confusion = {CONFUSION: confusion_csv(test.confusion, self.data.classes)}
        if self.data.test is None or not self.evaluator.ranks.leads:
            return confusion
        try:
            return {**confusion, SAMPLES: samples_json(self.data.test, test, self.data.classes)}
        except UserError as error:
            # Another rank had read it. A finished training is worth more than its pictures.
            self.recorder.console.warn(f"there will be no sample predictions: {error}")
            return confusion
