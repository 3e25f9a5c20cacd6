"""Runs the training loop from the newest saved state to the end, or until a stop is requested. Runs on every rank.

The checkpoint at the end of an epoch precedes the validation. So after an interrupted validation, only the validation
is repeated.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torchrelay.stop_consensus import StepFlags, StopConsensus, StopRequested
from torchrelay.stop_signals import signals

from hpc.base.errors import TorchrelayError
from hpc.run.events.kinds import FirstStep, Problem, TrainStarted, TrainStopped
from training.checkpoint.initial_weights import load_initial_weights
from training.checkpoint.saver import Saver
from training.checkpoint.state import TrainState, identity
from training.config.rules import without_effect
from training.config.train_config import TrainConfig, highest_learning_rate, samples_per_group
from training.data.batch_schedule import BatchSchedule
from training.data.dataset import Data, empty_classes
from training.data.loader import load_device_batches
from training.engine.corrupt_images import CorruptImages
from training.engine.early_stopping import MAX_HOURS, PATIENCE, EarlyStopping, out_of_patience
from training.engine.loss import Loss
from training.engine.loss_meter import DivergedError, LossMeter, Totals
from training.engine.optim import follow_plateau, make_optimizer
from training.engine.recomputation import Recomputation
from training.engine.step import Stepper
from training.engine.step_timer import StepTimer
from training.evaluation.evaluator import Evaluator
from training.evaluation.validation import Validator
from training.models.compiled_code import kept_code
from training.models.ema import Ema
from training.models.factory import Preprocess
from training.models.parallel import place_model
from training.monitoring.run_logger import JsonLines, RunLogger
from training.runtime.determinism import Numerics
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext


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
        self.heartbeat = context.heartbeat
        model = place_model(model, config, group)
        with group.raise_on_all_ranks():
            self.logger = RunLogger(context.run_dir, context.attempt, writes=group.is_rank_zero)
        self.console = self.logger.console
        samples = context.run_dir.sample_log(context.attempt, group.rank)
        self.samples = JsonLines(context.run_dir, samples, self.console)
        self.schedule = BatchSchedule(
            # A training set that is smaller than a batch is one batch.
            samples=len(data.train), batch_size=min(config.batch_size, len(data.train)), epochs=config.epochs,
            seed=config.seed, samples_per_group=samples_per_group(config), repetitions=config.repeated_augmentation,
        )  # fmt: skip
        self.state = TrainState(
            model=model,
            optimizer=make_optimizer(config, model),
            # It keeps float16 gradients from vanishing.
            scaler=GradScaler(group.device.type, enabled=config.amp == "fp16"),
            ema=Ema(model, config.ema_decay) if config.ema_decay else None,
            identity=identity(config, data),
        )
        # Any other object that must survive an interruption registers here too.
        self.loss_meter = self.state.register("loss_meter", LossMeter(group))
        self.early_stopping = self.state.register("early_stopping", EarlyStopping(config))
        self.numerics = self.state.register("numerics", Numerics(config, group))
        corrupt_images = CorruptImages(data.train, config.max_corrupt_images, group, self.logger)
        self.corrupt_images = self.state.register("corrupt_images", corrupt_images)
        loss = Loss(config, data.train.labels, len(data.classes), group.device)
        self.stepper = Stepper(context, self.schedule, group, self.state, preprocess, loss)
        self.step_timer = StepTimer(context, group, model)
        self.saver = Saver(context, self.state, group, self.logger)
        self.stop_consensus = StopConsensus(group.control)
        self.validator = self.make_validator(preprocess)
        self.totals: Totals | None = None
        """The totals of the last logged step; None once its loss is checked."""
        self.recomputation = Recomputation(context, group)
        self.ended: str | None = None
        """PATIENCE or MAX_HOURS if the training ended early, or None."""

    def make_validator(self, preprocess: Preprocess) -> Validator:
        """Return a validator of the averaged model (--ema-decay) if it exists, or of the trained model."""
        evaluator = Evaluator(
            config=self.config,
            model=self.state.ema.model if self.state.ema else self.state.model,
            preprocess=replace(preprocess, size=self.config.eval_image_size or preprocess.size),
            group=self.group,
            # An evaluation does not augment, so indexing images in memory is faster than starting workers.
            workers=0 if self.data.in_memory else self.workers,
        )
        return Validator(
            context=self.context,
            evaluator=evaluator,
            data=self.data,
            state=self.state,
            corrupt_images=self.corrupt_images.indices,
            logger=self.logger,
        )

    def run(self) -> None:
        """Train to the end, or until all ranks agree to stop. The last step is saved in both cases."""
        with kept_code(self.context, self.group) if self.config.compile else nullcontext():
            self.stepper.warm_up(self.data.channels, self.data.size)
        self.resume()
        try:
            try:
                for _ in self.steps():
                    pass
                self.complete()
            except StopRequested as request:
                self.save_and_stop(request)
        except (TorchrelayError, KeyboardInterrupt) as error:
            if isinstance(error, DivergedError):
                divergence = self.recomputation.describe(error)
                self.logger.record_divergence(divergence, self.schedule.batch(error.step), self.data.train)
            # Wait for the writers only after expected errors: other exceptions may come from a writer itself.
            self.finish_writing()
            raise
        self.finish_writing()
        self.stop_consensus.wait()

    def finish_writing(self) -> None:
        """Wait until all writes that have begun are complete."""
        self.saver.writer.wait()
        self.logger.close()

    # --- before the first step ---

    def resume(self) -> None:
        """Restore the newest state if there is one, and print and record where the training starts."""
        self.heartbeat.beat("start")
        began = time.monotonic()
        restored = self.saver.restore()
        if restored is None and self.config.weights:
            self.console.print(load_initial_weights(self.context, self.state, self.group))
        if self.config.deterministic != "off" and not self.stepper.unrepeatable and not self.numerics.changes:
            self.recomputation.begin(self.state.progress.step)
        self.early_stopping.start_clock()
        restore_seconds = time.monotonic() - began
        progress = self.state.progress
        started = self.context.started
        self.logger.resume(progress)
        event = TrainStarted(
            step=progress.step,
            epoch=min(progress.epoch + 1, self.config.epochs),
            total_steps=self.schedule.total_steps,
            world_size=self.group.world_size,
            restored_from=restored.path.name if restored else None,
            source=restored.source if restored else None,
            train_seconds=round(self.loss_meter.train_seconds, 3),
            seconds=round(time.monotonic() - started, 3),
            restore_seconds=round(restore_seconds, 3),
            connect_seconds=round(self.group.connected_at - started, 3),
        )
        self.logger.event(event)
        origin = f"resuming from {restored.source} {restored.path.name}" if restored else "starting"
        self.console.print(f"{origin}: {describe(self.config, self.data, self.schedule, self.group, self.state.model)}")
        self.report_numerics(progress.step)
        for warning in (*without_effect(self.config), *empty_classes(self.data)):
            self.console.warn(warning)
        self.heartbeat.beat("start", progress.step)
        if not progress.samples_seen:
            self.save()  # if a snapshot alone has the end of an epoch: its checkpoint comes before its evaluation

    def report_numerics(self, step: int) -> None:
        """Warn if the next steps may be rounded differently than in an uninterrupted training, and say why."""
        if changes := self.numerics.changes:
            self.logger.event(Problem(what="numerics_changed", step=step, detail=", ".join(changes)))
            self.console.warn(
                f"resuming with {', '.join(changes)}: the steps to come use the same images but are rounded differently"
            )
        if self.config.deterministic != "off" and (operations := self.stepper.unrepeatable):
            self.logger.event(Problem(what="unrepeatable", detail=", ".join(operations)))
            self.console.warn(
                f"{', '.join(operations)}: there is no deterministic kernel here, so an interrupted training may end "
                "with different bits (--deterministic error refuses such operations, off hides this line)"
            )

    # --- steps ---

    def steps(self) -> Iterator[None]:
        """Make a step before each yield until the training ends. Sets `ended` if the training ends early."""
        progress, group = self.state.progress, self.group
        self.validate_if_due()
        self.ended = self.early_stopping.reason(progress, group)
        if self.ended:
            return
        requests = self.schedule.requests(progress.epoch, progress.samples_seen, group.rank, group.world_size)
        first = progress.step + 1
        with load_device_batches(group.device, self.data.train, requests, self.workers) as batches:
            for batch in self.step_timer.batches(batches, progress):
                agreed = self.agree() if self.stop_consensus.is_due() else StepFlags()
                if agreed.save:
                    self.save()
                if agreed.snapshot:
                    self.saver.save(durable=False)
                if agreed.end or out_of_patience(self.config, progress):
                    self.check_loss(now=True)
                    self.save()
                    self.ended = MAX_HOURS if agreed.end else PATIENCE
                    return
                self.context.fault.inject("boundary", progress.step + 1, group.rank)
                if self.config.log_samples:
                    self.samples.append({"step": progress.step + 1, "indices": batch.indices.tolist()})
                self.loss_meter.begin_step(self.step_timer.loading_seconds)
                self.corrupt_images.add(batch.corrupt.tolist())
                self.stepper.step(batch, self.loss_meter)
                # Check the last logged loss while the device computes this step.
                self.check_loss()
                self.step_timer.step_done()
                if progress.step == first:
                    group.wait_for_device()
                    self.logger.event(FirstStep(step=first))
                self.log_if_due()
                epoch_ended = progress.samples_seen == 0
                if epoch_ended:
                    self.check_loss()
                if epoch_ended or self.saver.checkpoints.due_by_step(progress.step):
                    self.save()
                self.validate_if_due()
                yield

    def agree(self) -> StepFlags:
        """Exchange flags with the other ranks, and return the flags agreed on at the previous exchange.

        Raises StopRequested if a rank received a signal.
        """
        is_rank_zero = self.group.is_rank_zero
        steps_left = self.schedule.total_steps - self.state.progress.step
        snapshot_due = is_rank_zero and self.saver.snapshot_is_due(self.stop_consensus.interval)
        return self.stop_consensus.exchange(
            StepFlags(
                signal=signals.received(),
                save=int(is_rank_zero and self.saver.writer.checkpoint_is_due),
                snapshot=int(snapshot_due),
                end=int(is_rank_zero and self.early_stopping.out_of_time),
            ),
            # A snapshot is then late by at most a quarter of its interval, and ranks agree on a stop before the end.
            max_interval=min(self.saver.snapshots.steps or math.inf, steps_left) / 4,
        )

    def save(self) -> None:
        """Start to write a checkpoint, unless this step has one. If the loss is not finite, none is written."""
        if self.saver.checkpoints.is_saved(self.state.progress.step):
            return
        self.heartbeat.beat("save", self.state.progress.step)
        # Copying the state is not training time, but waiting for a slow disk is.
        self.loss_meter.leave_out(self.saver.save(durable=True))
        self.heartbeat.beat("step")

    def check_loss(self, *, now: bool = False) -> None:
        """Check the loss of the last logged step. If `now`, wait for the device, and check the loss of this step, too.

        Raises DivergedError if the loss is not finite.
        """
        if totals := self.totals:
            self.totals = None
            totals.check()
            self.recomputation.passed(totals.step)
        if now:
            self.loss_meter.totals(self.state.progress.step).check()

    def validate_if_due(self) -> None:
        """Validate if an epoch has ended. Validating is not training time, but waiting for a slow disk is."""
        began = time.monotonic()
        if result := self.validator.validate_if_due(self.before_batch):
            self.loss_meter.leave_out(time.monotonic() - began)
            follow_plateau(self.config, self.state.progress, result.loss)
            self.validator.record(result)

    def before_batch(self) -> None:
        """Exchange flags before a batch of an evaluation, so that a stop need not wait for the evaluation's end."""
        self.heartbeat.beat("evaluate", self.state.progress.step)
        self.agree()
        self.context.fault.inject("evaluate", self.state.progress.step, self.group.rank)

    def save_and_stop(self, request: StopRequested) -> None:
        """Save, and record the seconds since the signal arrived, which the grace period must exceed."""
        requested_at = signals.received_at() or time.monotonic()
        self.check_loss(now=True)
        self.save()
        self.heartbeat.beat("end")
        self.saver.finish()
        self.logger.metrics.wait()
        self.logger.best.wait()
        step = self.state.progress.step
        seconds = round(time.monotonic() - requested_at, 3)
        self.logger.event(TrainStopped(step=step, signal=request.name, seconds=seconds))
        self.console.print(f"stopped by {request.name} after step {step}")

    def log_if_due(self) -> None:
        """Log the mean metrics since the last line, every --log-every steps and at the end of an epoch."""
        step = self.state.progress.step
        meter = self.loss_meter
        if step % self.config.log_every and self.state.progress.samples_seen:
            return
        speed = meter.images_per_second()
        self.totals = meter.totals(step)
        self.state.progress.logged_step = step
        record = {
            "lr": float(self.state.optimizer.param_groups[0]["lr"]),
            "images_per_second": round(speed, 1),
            "world_size": self.group.world_size,
            "train_seconds": round(meter.train_seconds, 3),
            "memory_bytes": self.group.used_memory,
        }
        self.logger.log_later(partial(self.log, self.totals, record))
        meter.restart()

    def log(self, totals: Totals, record: dict[str, Any]) -> None:
        """Wait for the device, and log `record` and the means of a step. Runs in the logger's thread."""
        if (means := totals.means()) is None:
            return
        step, total_steps = totals.step, self.schedule.total_steps
        speed = record["images_per_second"]
        epoch = (step - 1) // self.schedule.steps_per_epoch + 1
        measured = {name: round(value, 6) for name, value in means._asdict().items()}
        self.logger.log_metrics({"step": step, "epoch": epoch, **measured, **record})
        seconds_left = round((total_steps - step) * self.schedule.batch_size / max(speed, 0.1))
        self.console.print(
            f"epoch {epoch}/{self.config.epochs} step {step}/{total_steps} loss {means.loss:.3f} "
            f"lr {record['lr']:.4f} {speed:.0f} img/s, {means.data_wait_share:.0%} waiting for data, "
            f"{record['memory_bytes'] / 2**30:.2f} GiB, eta {seconds_left // 60}:{seconds_left % 60:02d}"
        )

    # --- after the last step ---

    def complete(self) -> None:
        """Test the model after the last step, and write `final/`."""
        if self.ended:
            step = self.state.progress.step
            self.console.print(f"the training ends early, after step {step}: {self.early_stopping.message(self.ended)}")
        self.save()  # an attempt that was killed at its end may have left the last step as a snapshot alone
        try:
            self.validator.complete(self.before_batch, self.ended)
        except TorchrelayError:
            # If `final/` cannot be written, only rank 0 raises this. The other ranks call clear_snapshots, which is a
            # collective, so rank 0 must call it, too.
            self.clear_snapshots()
            raise
        self.clear_snapshots()

    def clear_snapshots(self) -> None:
        """Remove all snapshots if the run is complete. All ranks must call this."""
        complete = self.group.is_rank_zero and self.context.run_dir.final_result.exists()
        if any(self.group.all_gather_json(complete)):
            self.saver.clear()


def describe(config: TrainConfig, data: Data, schedule: BatchSchedule, group: ProcessGroup, model: nn.Module) -> str:
    """Return one line that describes the model, data, steps and optimizer."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    on_device = ", images in its memory" if data.on_device else ""
    return (
        f"{config.model} ({parameters:,} parameters) on {len(data.train):,} images of {len(data.classes)} classes, "
        f"{schedule.total_steps} steps of {schedule.batch_size} images, "
        f"{config.optimizer} with lr {highest_learning_rate(config):.3g}, {group.description}{on_device}"
    )
