"""The training loop: from the newest saved state to the end, or until it is asked to stop. Runs on every rank.

All ranks do the same. The checkpoint at the end of an epoch comes before the validation, so a validation that is cut
short is done again, and costs nothing else.
"""

import time
from dataclasses import replace

from torch import nn

from hpc.core.errors import TorchrelayError
from training.checkpoint.capture import Capturer
from training.checkpoint.checkpoint_writer import CheckpointWriter
from training.checkpoint.initial_weights import load_initial_weights
from training.checkpoint.restore import restore
from training.checkpoint.snapshot_writer import SnapshotWriter
from training.checkpoint.state import TrainState, identity
from training.config.rules import without_effect
from training.config.train_config import TrainConfig, samples_per_group
from training.data.batch_schedule import BatchSchedule, make_schedule
from training.data.dataset import Data
from training.data.loader import Batch, load_device_batches
from training.engine.corrupt_images import CorruptImages
from training.engine.early_stopping import MAX_HOURS, PATIENCE, EarlyStopping, out_of_patience
from training.engine.loss_meter import DivergedError, LossMeter
from training.engine.lr_schedule import follow_plateau
from training.engine.optim import make_optimizer, rate_of
from training.engine.step import Stepper
from training.engine.step_timer import StepTimer
from training.evaluation.evaluator import Evaluator
from training.evaluation.validation import Validator
from training.models.ema import Ema
from training.models.factory import Preprocess
from training.models.parallel import place_model
from training.models.precision import make_scaler
from training.monitoring.metrics import JsonLines
from training.monitoring.run_logger import RunLogger
from training.runtime import signals
from training.runtime.console import Console
from training.runtime.process_group import ProcessGroup
from training.runtime.progress import Progress
from training.runtime.run_context import RunContext
from training.runtime.stop_consensus import StepFlags, StopConsensus, StopRequested


class Trainer:
    """One rank's part in the training of one model."""

    def __init__(
        self,
        context: RunContext,
        group: ProcessGroup,
        data: Data,
        model: nn.Module,
        preprocess: Preprocess,
        workers: int,
    ) -> None:
        config = context.config
        self.config, self.context, self.group, self.data, self.workers = config, context, group, data, workers
        self.preprocess = preprocess
        self.schedule = make_schedule(
            len(data.train), config.batch_size, config.epochs, config.seed, samples_per_group(config)
        )
        model = place_model(model, config, group)
        self.state = TrainState(
            model=model,
            optimizer=make_optimizer(config, model),
            scaler=make_scaler(config, group.device),
            ema=Ema(model, config.ema_decay) if config.ema_decay else None,
            progress=Progress(),
            identity=identity(config, data),
            sharded=config.strategy == "fsdp",
        )
        self.stepper = Stepper(config, self.schedule, group, self.state, preprocess, context.fault)
        self.heartbeat = context.heartbeat
        self.step_timer = StepTimer(context, group, model)
        self.console = Console(enabled=group.is_rank_zero)
        with group.raise_on_all_ranks():
            self.logger = RunLogger(context.run_dir, context.attempt, self.console, writes=group.is_rank_zero)
        self.samples = JsonLines(context.run_dir.sample_log(context.attempt, group.rank), self.console)
        self.corrupt = CorruptImages(data.train, config.max_corrupt_images, self.state.progress, group, self.logger)
        self.stop_consensus = StopConsensus(group.control)
        self.loss_meter = LossMeter(group)
        self.early_stopping = EarlyStopping(config)
        self.capturer = Capturer(
            state=self.state,
            loss_meter=self.loss_meter,
            early_stopping=self.early_stopping,
            corrupt=self.corrupt,
            group=group,
            attempt=context.attempt,
        )
        self.checkpoint_writer = CheckpointWriter(context, self.capturer, self.logger)
        self.snapshot_writer = SnapshotWriter(context, self.capturer, self.logger)
        evaluator = Evaluator(
            config=config,
            model=self.state.evaluated_model,
            preprocess=replace(preprocess, size=config.eval_image_size or preprocess.size),
            group=group,
            classes=len(data.classes),
            # Images in memory are not augmented in an evaluation: to start workers takes longer than to take them.
            workers=0 if data.in_memory else workers,
        )
        self.validator = Validator(
            context=context, evaluator=evaluator, data=data, state=self.state, logger=self.logger
        )

    def run(self) -> None:
        """Train to the end, or until all ranks agree to stop; either way nothing is lost."""
        self.stepper.warm_up(self.data.channels, self.data.size)
        self.resume()
        try:
            self.complete(self.fit())
        except StopRequested as request:
            self.save_and_stop(request)
        except (TorchrelayError, KeyboardInterrupt) as error:
            if isinstance(error, DivergedError):
                self.logger.record_divergence(error.step, error.loss, self.schedule.batch(error.step), self.data.train)
            # What is being written is worth waiting for; after a crash it is not.
            self.finish_writing()
            raise
        finally:
            self.console.stop()
        self.finish_writing()
        self.stop_consensus.wait()

    def finish_writing(self) -> None:
        """Until everything that was begun to be written is on the disk."""
        self.snapshot_writer.wait()
        self.checkpoint_writer.wait()
        self.logger.close()

    # --- before the first step ---

    def resume(self) -> None:
        """Go on from the newest state, and say so."""
        self.heartbeat.beat("start")
        began = time.monotonic()
        restored = restore(self.context, self.state, self.group, self.logger)
        if restored is None and self.config.weights:
            self.console.print(load_initial_weights(self.config, self.state, self.group))
        if restored:
            self.loss_meter.restore(restored.numbers, counts_loss=self.group.is_rank_zero)
        self.early_stopping.begin(restored.numbers if restored else None)
        self.checkpoint_writer.begin(restored.source if restored else None)
        self.snapshot_writer.begin()
        restore_seconds = time.monotonic() - began
        progress = self.state.progress
        self.logger.resume(progress)
        self.logger.event(
            "train_started",
            step=progress.step,
            epoch=min(progress.epoch + 1, self.config.epochs),
            total_steps=self.schedule.total_steps,
            world_size=self.group.world_size,
            restored_from=restored.name if restored else None,
            source=restored.source if restored else None,
            seconds=round(time.monotonic() - self.context.started, 3),
            restore_seconds=round(restore_seconds, 3),
            connect_seconds=round(self.group.connected_at - self.context.started, 3),
        )
        begin = f"resuming from {restored.source} {restored.name}" if restored else "starting"
        self.console.print(f"{begin}: {describe(self.config, self.data, self.schedule, self.group, self.state.model)}")
        for told in without_effect(self.config):
            self.console.warn(told)
        self.console.start(progress.step, self.schedule.total_steps)
        self.heartbeat.beat("start", progress.step)

    # --- steps ---

    def fit(self) -> str | None:
        """All steps that are left, with a checkpoint and a validation after each epoch.

        Returns:
            Why no more follow, before the last epoch's end; None: there are none left.
        """
        progress, ranks = self.state.progress, self.group
        self.validate_if_due()
        if over := self.early_stopping.why_over(progress, ranks):
            return over
        requests = self.schedule.requests(progress.epoch, progress.samples_seen, ranks.rank, ranks.world_size)
        first = progress.step + 1
        with load_device_batches(ranks.device, self.data.train, requests, self.workers) as batches:
            for batch in self.step_timer.batches(batches, progress):
                if over := self.agree_and_save():
                    self.save()
                    return over
                self.context.fault.inject("boundary", progress.step + 1, ranks.rank)
                self.log_samples(batch)
                self.loss_meter.add_wait(self.step_timer.loading)
                self.corrupt.add(batch.corrupt.tolist())
                self.stepper.step(batch, self.loss_meter)
                self.step_timer.step_done()
                if progress.step == first:
                    ranks.wait_for_device()
                    self.logger.event("first_step", step=first)
                self.console.step(progress.step)
                self.log_if_due()
                if self.checkpoint_writer.due_by_step():
                    self.save()
                self.validate_if_due()
        return None

    def agree_and_save(self) -> str | None:
        """At the boundary between two steps, do what was agreed on at the one before.

        Returns:
            Why no step is to follow; None: one is.
        """
        agreed = self.agree()
        if agreed.save:
            self.save()
        if agreed.snapshot:
            self.snapshot_writer.take()
        if agreed.end:
            return MAX_HOURS
        return PATIENCE if out_of_patience(self.config, self.state.progress) else None

    def agree(self) -> StepFlags:
        """Exchange wishes with the other ranks, and return what is agreed on."""
        wishes = StepFlags(
            signal=signals.received(),
            save=int(self.group.is_rank_zero and self.checkpoint_writer.due_by_time()),
            snapshot=int(self.snapshot_writer.due()),
            corrupt_images=int(self.corrupt.has_news),
            end=int(self.group.is_rank_zero and self.early_stopping.used_up),
        )
        agreed = self.stop_consensus.exchange(wishes)
        if agreed.corrupt_images:
            self.corrupt.share()
        return agreed

    def save(self) -> None:
        """Begin to write a checkpoint."""
        self.heartbeat.beat("save", self.state.progress.step)
        self.checkpoint_writer.save()
        self.heartbeat.beat("step")

    def validate_if_due(self) -> None:
        """After an epoch, validate; that time is not training time."""
        began = time.monotonic()
        result = self.validator.validate_if_due(self.before_batch)
        if result:
            follow_plateau(self.config, self.state.progress, result.loss)
            self.loss_meter.leave_out(time.monotonic() - began)

    def before_batch(self) -> None:
        """Between two batches of an evaluation: a wish to stop does not wait for its end."""
        self.heartbeat.beat("evaluate", self.state.progress.step)
        self.agree()
        self.context.fault.inject("evaluate", self.state.progress.step, self.group.rank)

    def save_and_stop(self, request: StopRequested) -> None:
        """Save, and tell how long that took, from the signal's arrival here: by that the grace period can be chosen."""
        asked = signals.received_at() or time.monotonic()
        self.save()
        self.heartbeat.beat("end")
        self.checkpoint_writer.finish()
        step, seconds = self.state.progress.step, round(time.monotonic() - asked, 3)
        self.logger.event("train_stopped", step=step, signal=request.name, seconds=seconds)
        self.console.print(f"stopped by {request.name} after step {step}")

    def log_samples(self, batch: Batch) -> None:
        """Write down which images this rank uses in the step to come."""
        if self.config.log_samples:
            self.samples.append({"step": self.state.progress.step + 1, "indices": batch.indices.tolist()})

    def log_if_due(self) -> None:
        """Every --log-every steps and at the end of an epoch, record the mean loss since the last time."""
        step = self.state.progress.step
        if step % self.config.log_every and self.state.progress.samples_seen:
            return
        speed = self.loss_meter.images_per_second()
        loss = self.loss_meter.total_loss(step) / self.loss_meter.images
        epoch = (step - 1) // self.schedule.steps_per_epoch + 1
        lr = rate_of(self.state.optimizer)
        waiting, memory = self.loss_meter.data_wait_share, self.group.used_memory
        self.state.progress.logged_step = step
        self.logger.log_train(
            {
                "step": step,
                "epoch": epoch,
                "loss": round(loss, 6),
                "lr": lr,
                "images_per_second": round(speed, 1),
                "world_size": self.group.world_size,
                "train_seconds": round(self.loss_meter.train_seconds, 3),
                "data_wait_share": round(waiting, 4),
                "memory_bytes": memory,
            }
        )
        left = round((self.schedule.total_steps - step) * self.schedule.batch_size / speed)
        self.console.metrics(
            f"epoch {epoch}/{self.config.epochs} step {step}/{self.schedule.total_steps}",
            f"loss {loss:.3f} lr {lr:.4f} {speed:.0f} img/s, {waiting:.0%} waiting for data, "
            f"{memory / 2**30:.2f} GiB, eta {left // 60}:{left % 60:02d}",
        )
        self.loss_meter.restart()

    def complete(self, ended: str | None) -> None:
        """Test the model as it is after the last step, and write `final/`; `ended` is why that came early."""
        if ended:
            self.console.print(f"no step follows step {self.state.progress.step}: {self.early_stopping.told(ended)}")
        try:
            self.validator.complete(self.before_batch, ended)
        except TorchrelayError:
            # All ranks come here: the others from having nothing to write. After a crash they would not.
            self.snapshot_writer.end()
            raise
        self.snapshot_writer.end()


def describe(config: TrainConfig, data: Data, schedule: BatchSchedule, group: ProcessGroup, model: nn.Module) -> str:
    """What will be trained, in one line."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    on_device = ", images in its memory" if data.on_device else ""
    return (
        f"{config.model} ({parameters:,} parameters) on {len(data.train):,} images of {len(data.classes)} classes, "
        f"{schedule.total_steps} steps of {schedule.batch_size} images, {group.description}{on_device}"
    )
