"""The training loop: from the newest checkpoint to the end, or until it is asked to stop. Runs on every rank.

All ranks do the same. The checkpoint at the end of an epoch comes before the validation, so a validation that is cut
short is done again, and costs nothing else.
"""

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hpc.rundir import RunDir
from training import stop
from training.agreement import Agreement, StopRequested
from training.config import TrainConfig
from training.console import Console
from training.counted import Purpose, stream
from training.data import Data, Source, load_ahead
from training.distributed import Ranks, SharedError
from training.evaluate import Evaluation, Evaluator
from training.model import Preprocess
from training.optim import autocast, learning_rate, make_optimizer, set_learning_rate
from training.plan import make_plan
from training.recorder import Recorder
from training.saver import Saver
from training.state import Progress, TrainState, identity, to_bytes
from training.window import Window


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, where its files go, and which attempt this is."""

    config: TrainConfig
    run_dir: RunDir
    attempt: int
    started: float
    """time.monotonic() when the process began."""


class Trainer:
    """One rank's part in the training of one model."""

    def __init__(
        self, job: Job, ranks: Ranks, data: Data, model: nn.Module, preprocess: Preprocess, workers: int
    ) -> None:
        self.config, self.job, self.ranks, self.data, self.workers = job.config, job, ranks, data, workers
        self.preprocess = preprocess
        self.plan = make_plan(len(data.train), job.config.batch_size, job.config.epochs, job.config.seed)
        self.model = model.to(ranks.device)
        # Before each forward pass every rank gets rank 0's batch statistics, so rank 0's are those to save.
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.state = TrainState(
            model=self.model,
            optimizer=make_optimizer(job.config, self.model),
            progress=Progress(),
            identity=identity(job.config, data),
        )
        self.console = Console(speaks=ranks.leads)
        self.recorder = Recorder(job.run_dir, job.attempt, self.console, writes=ranks.leads)
        self.agreement = Agreement(ranks.control)
        self.window = Window(ranks)
        checkpoints = job.run_dir.checkpoints
        self.saver = Saver(job.config, checkpoints, self.state, self.window, ranks, self.recorder)

    def run(self) -> None:
        """Train to the end, or until all ranks agree to stop; either way nothing is lost."""
        self.fix_buckets()
        self.resume()
        # First the checkpoint, then the loader's workers, who may take their time to end.
        with ExitStack() as loaders:
            try:
                self.fit(loaders)
                self.complete()
            except StopRequested as request:
                self.saver.save_unless_saved()
                self.recorder.event("train_stopped", step=self.state.progress.step, signal=request.name)
                self.console.say(f"stopped by {request.name} after step {self.state.progress.step}")
            finally:
                self.console.stop()
                self.recorder.close()
        self.agreement.settle()

    # --- before the first step ---

    def fix_buckets(self) -> None:
        """Make a backward pass that changes nothing.

        DDP lays out its buckets anew after the first backward pass, which changes the order of the sums of three and
        more ranks. If that pass is not a step, the steps of a resumed run add up as those of an uninterrupted one do.
        """
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        images = min(2, self.plan.batch_size // self.ranks.world_size)
        shape = (images, self.data.channels, self.data.size, self.data.size)
        try:
            with autocast(self.config, self.ranks.device):
                logits = self.ddp(self.preprocess(torch.zeros(shape, dtype=torch.uint8)))
        except ValueError as error:
            # What batch normalisation says if it sees one value.
            raise SharedError(f"{self.config.model} cannot train on {images} images a rank ({error})") from error
        logits.float().sum().backward()
        self.ddp.zero_grad()
        for name, buffer in self.model.named_buffers():
            buffer.copy_(before[name])

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
        weights = sum(parameter.numel() for parameter in self.model.parameters())
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
        for images, labels in loaders.enter_context(ahead):
            if self.agree():
                self.saver.save()
            self.step(images, labels)
            self.log_if_due()
            if self.saver.due_by_step():
                self.saver.save()
            self.validate_if_due()

    def agree(self) -> bool:
        """Exchange wishes with the other ranks, and return whether a checkpoint is due."""
        return self.agreement.exchange(signal=stop.received(), save=self.ranks.leads and self.saver.due_by_time())

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One optimizer step on the global batch, of which this rank has a share.

        DDP averages over the ranks. Each rank's sum is scaled such that the average is the mean over the global
        batch, however unequal the shares.
        """
        progress, config = self.state.progress, self.config
        torch.manual_seed(stream(config.seed, Purpose.STEP, progress.step, self.ranks.rank))
        self.model.train()
        set_learning_rate(self.state.optimizer, self.learning_rate(progress.step))
        labels = labels.to(self.ranks.device, non_blocking=True)
        with autocast(config, self.ranks.device):
            logits = self.ddp(self.preprocess(images))
        loss = functional.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=config.label_smoothing)
        torch.autograd.backward(loss * (self.ranks.world_size / self.plan.batch_size))
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.window.add(loss, self.plan.batch_size)
        progress.step += 1
        progress.samples_seen += self.plan.batch_size
        if progress.samples_seen == self.plan.samples_per_epoch:
            progress.epoch, progress.samples_seen = progress.epoch + 1, 0
        self.console.step(progress.step)

    def learning_rate(self, step: int) -> float:
        """That of the step after `step` steps."""
        return learning_rate(self.config, step, self.plan.steps_per_epoch)

    def log_if_due(self) -> None:
        """Every --log-every steps, record the mean loss since the last time."""
        step = self.state.progress.step
        if step % self.config.log_every and step != self.plan.total_steps:
            return
        speed = self.window.images_per_second()
        loss = self.window.total_loss(step) / self.window.images
        epoch = (step - 1) // self.plan.steps_per_epoch + 1
        lr = self.learning_rate(step - 1)
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
            model=self.model,
            preprocess=self.preprocess,
            ranks=self.ranks,
            classes=len(self.data.classes),
            workers=self.workers,
        )
        result = evaluator.evaluate(source, self.agree)
        progress = self.state.progress
        numbers = {"loss": round(result.loss, 6), "accuracy": result.accuracy}
        counts = {"correct": result.correct, "total": result.total}
        place = {"step": progress.step, "epoch": progress.epoch, "split": split}
        self.recorder.evaluation(place | numbers | counts)
        self.console.say(f"epoch {progress.epoch} {split} accuracy {result.accuracy:.2%} loss {result.loss:.4f}")
        self.window.leave_out(time.monotonic() - began)
        return result

    def validate_if_due(self) -> None:
        """After an epoch, validate, and keep the model if it is the best so far."""
        progress = self.state.progress
        if progress.evaluated_epochs == progress.epoch or self.data.val is None:
            return
        result = self.evaluate(self.data.val, "val")
        progress.val_loss, progress.val_accuracy = result.loss, result.accuracy
        if progress.best_accuracy is None or result.accuracy > progress.best_accuracy:
            progress.best_accuracy = result.accuracy
            self.recorder.best(self.model_bytes(), self.result())
        progress.evaluated_epochs = progress.epoch

    def model_bytes(self) -> bytes:
        """The model's weights, under the names that the model's own code gives them."""
        return to_bytes(self.model.state_dict()) if self.ranks.leads else b""

    def result(self) -> dict[str, Any]:
        """What is known of the model as it is now."""
        progress = self.state.progress
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "val_accuracy": progress.val_accuracy,
            "val_loss": progress.val_loss,
            "best_val_accuracy": progress.best_accuracy,
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
            "model": "after the last step",
            **self.result(),
        }
        self.recorder.final(self.model_bytes(), result, test.confusion if test else None, self.data.classes)
        self.recorder.event("train_completed", step=self.state.progress.step)
        known = f"test accuracy {test.accuracy:.2%}" if test else "there is no test set"
        self.console.say(f"complete after {self.state.progress.step} steps: {known}")
