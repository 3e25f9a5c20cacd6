"""The training loop: from the newest checkpoint to the end, or until it is asked to stop. Runs on every rank.

All ranks do the same. The checkpoint at the end of an epoch comes before the validation, so a validation that is cut
short is done again, and costs nothing else.
"""

import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from training import stop
from training.agreement import Agreement, StopRequested, Wishes
from training.config import together
from training.console import Console
from training.corrupt import CorruptImages, check_limit
from training.data import Batch, Data, Source, load_ahead
from training.distributed import Ranks
from training.ema import Ema
from training.evaluate import Evaluation, Evaluator, confusion_csv
from training.job import Job
from training.metrics import Lines
from training.model import Preprocess
from training.optim import learning_rate, make_optimizer, make_scaler
from training.plan import make_plan
from training.recorder import Recorder
from training.saver import Saver
from training.state import Progress, TrainState, identity
from training.step import Stepper
from training.window import Window


class Trainer:
    """One rank's part in the training of one model."""

    def __init__(
        self, job: Job, ranks: Ranks, data: Data, model: nn.Module, preprocess: Preprocess, workers: int
    ) -> None:
        config = job.config
        self.config, self.job, self.ranks, self.data, self.workers = config, job, ranks, data, workers
        self.preprocess = preprocess
        batch_size = config.batch_size
        self.plan = make_plan(len(data.train), batch_size, config.epochs, config.seed, together(config))
        model = model.to(ranks.device)
        self.state = TrainState(
            model=model,
            optimizer=make_optimizer(config, model),
            scaler=make_scaler(config, ranks.device),
            ema=Ema(model, config.ema) if config.ema else None,
            progress=Progress(),
            identity=identity(config, data),
        )
        self.stepper = Stepper(config, self.plan, ranks, self.state, preprocess, job.fault)
        self.console = Console(speaks=ranks.leads)
        with ranks.together():
            self.recorder = Recorder(job.run_dir, job.attempt, self.console, writes=ranks.leads)
        self.samples = Lines(job.run_dir.sample_log(job.attempt, ranks.rank), self.console)
        self.corrupt = CorruptImages(data.train, config.max_corrupt, self.state.progress, ranks, self.recorder)
        self.agreement = Agreement(ranks.control)
        self.window = Window(ranks)
        self.saver = Saver(job, self.state, self.window, ranks, self.recorder)

    def run(self) -> None:
        """Train to the end, or until all ranks agree to stop; either way nothing is lost."""
        self.stepper.warm_up(self.data.channels, self.data.size)
        self.resume()
        # First the checkpoint, then the workers of the training's loader, who may take their time to end.
        with ExitStack() as loaders:
            try:
                self.fit(loaders)
                self.complete()
            except StopRequested as request:
                self.corrupt.share()
                self.saver.save()
                self.saver.finish()
                self.recorder.event("train_stopped", step=self.state.progress.step, signal=request.name)
                self.console.say(f"stopped by {request.name} after step {self.state.progress.step}")
            finally:
                self.console.stop()
                self.saver.wait()
                self.recorder.close()
        self.agreement.settle()

    # --- before the first step ---

    def resume(self) -> None:
        """Go on from the newest checkpoint, and say so."""
        name = self.saver.restore()
        progress = self.state.progress
        self.recorder.resume(progress)
        self.recorder.event(
            "train_started",
            step=progress.step,
            epoch=min(progress.epoch + 1, self.config.epochs),
            total_steps=self.plan.total_steps,
            world_size=self.ranks.world_size,
            restored_from=name or None,
            seconds=round(time.monotonic() - self.job.started, 3),
        )
        self.console.say(self.greeting(name))
        self.console.start(progress.step, self.plan.total_steps)

    def greeting(self, checkpoint: str) -> str:
        """What is about to be trained."""
        weights = sum(parameter.numel() for parameter in self.state.model.parameters())
        begin = f"resuming from {checkpoint}" if checkpoint else "starting"
        return (
            f"{begin}: {self.config.model} ({weights:,} weights) on {len(self.data.train):,} images of "
            f"{len(self.data.classes)} classes, {self.plan.total_steps} steps of {self.plan.batch_size} images, "
            f"{self.ranks.world_size} ranks on {self.ranks.device.type}"
        )

    # --- steps ---

    def fit(self, loaders: ExitStack) -> None:
        """All steps that are left, with a checkpoint and a validation after each epoch."""
        progress = self.state.progress
        self.validate_if_due()
        place = (self.ranks.rank, self.ranks.world_size)
        requests = self.plan.requests(progress.epoch, progress.samples_seen, *place)
        pinned = self.ranks.device.type == "cuda"
        ahead = load_ahead(self.data.train, requests, self.workers, pin_memory=pinned)
        for batch in loaders.enter_context(ahead):
            if self.agree():
                self.save()
            self.job.fault.strike("stop", progress.step + 1, self.ranks.rank)
            self.log_samples(batch)
            self.corrupt.add(batch.corrupt.tolist())
            self.stepper.step(batch, self.window)
            self.console.step(progress.step)
            self.log_if_due()
            if self.saver.due_by_step():
                self.save()
            self.validate_if_due()

    def agree(self) -> bool:
        """Exchange wishes with the other ranks, and return whether a checkpoint is due."""
        due = self.ranks.leads and self.saver.due_by_time()
        agreed = self.agreement.exchange(Wishes(stop.received(), int(due), int(self.corrupt.has_news)))
        if agreed.news:
            self.corrupt.share()
        return bool(agreed.save)

    def save(self) -> None:
        """Save what all ranks know."""
        self.corrupt.share()
        self.saver.save()

    def log_samples(self, batch: Batch) -> None:
        """Write down which images this rank uses in the step to come."""
        if self.config.log_samples:
            self.samples.append({"step": self.state.progress.step + 1, "indices": batch.indices.tolist()})

    def log_if_due(self) -> None:
        """Every --log-every steps, record the mean loss since the last time."""
        step = self.state.progress.step
        if step % self.config.log_every and step != self.plan.total_steps:
            return
        speed = self.window.images_per_second()
        loss = self.window.total_loss(step) / self.window.images
        epoch = (step - 1) // self.plan.steps_per_epoch + 1
        lr = learning_rate(self.config, step - 1, self.plan.steps_per_epoch)
        self.recorder.train(
            {
                "step": step,
                "epoch": epoch,
                "loss": round(loss, 6),
                "lr": lr,
                "images_per_second": round(speed, 1),
                "world_size": self.ranks.world_size,
            }
        )
        left = round((self.plan.total_steps - step) * self.plan.batch_size / speed)
        self.console.metrics(
            f"epoch {epoch}/{self.config.epochs} step {step}/{self.plan.total_steps}",
            f"loss {loss:.3f} lr {lr:.4f} {speed:.0f} img/s eta {left // 60}:{left % 60:02d}",
        )
        self.window.restart()

    # --- evaluation ---

    def evaluate(self, source: Source, split: str) -> Evaluation:
        """Evaluate and record it."""
        began = time.monotonic()
        evaluator = Evaluator(
            config=self.config,
            model=self.evaluated_model,
            preprocess=self.preprocess,
            ranks=self.ranks,
            classes=len(self.data.classes),
            workers=self.workers,
        )
        progress = self.state.progress
        result = evaluator.evaluate(source, self.before_batch)
        if result.corrupt:
            check_limit(source, result.corrupt, self.config.max_corrupt)
            names = ", ".join(map(source.name, result.corrupt))
            self.console.warn(f"others take the place of {len(result.corrupt)} unreadable images in {split}: {names}")
        numbers = {"loss": round(result.loss, 6), "accuracy": result.accuracy}
        counts = {"correct": result.correct, "total": result.total, "corrupt": len(result.corrupt)}
        place = {"step": progress.step, "epoch": progress.epoch, "split": split}
        self.recorder.evaluation(place | numbers | counts)
        self.console.say(f"epoch {progress.epoch} {split} accuracy {result.accuracy:.2%} loss {result.loss:.4f}")
        self.window.leave_out(time.monotonic() - began)
        return result

    def before_batch(self) -> None:
        """Between two batches of an evaluation."""
        self.agree()
        self.job.fault.strike("evaluate", self.state.progress.step, self.ranks.rank)

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that is evaluated and kept: the average, if there is one."""
        return self.state.ema.model if self.state.ema else self.state.model

    def validate_if_due(self) -> None:
        """After an epoch, validate, and keep the model if it is the best so far."""
        progress = self.state.progress
        if progress.evaluated_epochs == progress.epoch or self.data.val is None:
            return
        result = self.evaluate(self.data.val, "val")
        progress.val_loss, progress.val_accuracy = result.loss, result.accuracy
        if progress.best_accuracy is None or result.accuracy > progress.best_accuracy:
            progress.best_accuracy = result.accuracy
            self.recorder.best(self.weights(), self.result())
        progress.evaluated_epochs = progress.epoch

    def weights(self) -> dict[str, Tensor]:
        """A copy of the model's weights in the host's memory, under the names that the model's own code gives them."""
        if not self.ranks.leads:
            return {}
        return {name: value.to("cpu", copy=True) for name, value in self.evaluated_model.state_dict().items()}

    def result(self) -> dict[str, Any]:
        """What is known of the model as it is now."""
        progress = self.state.progress
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "val_accuracy": progress.val_accuracy,
            "val_loss": progress.val_loss,
            "best_val_accuracy": progress.best_accuracy,
            "weights": "moving average" if self.state.ema else "last",
            "corrupt_images": [self.data.train.name(index) for index in progress.corrupt],
            "classes": list(self.data.classes),
            "input": {
                "channels": self.preprocess.channels,
                "size": self.preprocess.size,
                "mean": self.data.mean,
                "std": self.data.std,
            },
            "config": asdict(self.config),
            "world_size": self.ranks.world_size,
            "attempt": self.job.attempt,
        }

    def complete(self) -> None:
        """Test the model as it is after the last step, and write `final/`."""
        test = self.evaluate(self.data.test, "test") if self.data.test is not None else None
        result = {
            "test_accuracy": test.accuracy if test else None,
            "test_loss": test.loss if test else None,
            "test_correct": test.correct if test else None,
            "test_total": test.total if test else None,
            **self.result(),
        }
        confusion = confusion_csv(test.confusion, self.data.classes) if test else None
        self.recorder.final(self.weights(), result, confusion)
        self.recorder.event("train_completed", step=self.state.progress.step)
        known = f"test accuracy {test.accuracy:.2%}" if test else "there is no test set"
        self.console.say(f"complete after {self.state.progress.step} steps: {known}")
