"""Makes optimizer steps, in which each rank processes its share of the global batch. Runs on every rank."""

import math
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from training.checkpoint.state import TrainState
from training.config.train_config import size_in_epoch, training_sizes
from training.data.batch_schedule import BatchSchedule, split_range
from training.data.loader import Batch
from training.data.transforms.mixup import Mixup, draw_mix, mix_images, mix_labels
from training.engine.loss import Loss
from training.engine.loss_meter import LossMeter
from training.engine.optim import learning_rate, set_learning_rate
from training.models.factory import Preprocess, autocast, set_train_mode
from training.models.parallel import compiler_error, postpone_reduction, wrap_for_training
from training.runtime.counter_rng import Purpose, derive_key
from training.runtime.determinism import operation_without_kernel, watch_operations
from training.runtime.process_group import ProcessGroup, SharedError
from training.runtime.rank_device import seed_generators
from training.runtime.run_context import RunContext


class Stepper:
    """Makes optimizer steps. All state that must survive an interruption is in the TrainState."""

    def __init__(
        self,
        context: RunContext,
        schedule: BatchSchedule,
        group: ProcessGroup,
        state: TrainState,
        preprocess: Preprocess,
        loss: Loss,
    ) -> None:
        self.config = context.config
        self.schedule = schedule
        self.group = group
        self.state = state
        self.preprocess = preprocess
        self.loss = loss
        self.fault = context.fault
        self.heartbeat = context.heartbeat
        self.size = preprocess.size
        self.wrapped = wrap_for_training(state.model, self.config, group)
        self.unrepeatable: list[str] = []
        """Names of the model's operations that have no deterministic kernel on this device; `warm_up` finds them."""

    def warm_up(self, channels: int, size: int) -> None:
        """Make backward passes on blank images (`channels` channels, `size` x `size` pixels). They change no state.

        After its first backward pass, DDP rebuilds its buckets, and then sums in another order if there are three or
        more ranks. These passes are no steps, so all steps of a resumed run sum in the order of an uninterrupted one.
        Raises SharedError if the model needs more images per rank, cannot be compiled, or lacks a deterministic kernel.
        """
        model = self.state.model
        set_train_mode(model)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        images = min(2, self.schedule.batch_size // (self.group.world_size * self.config.grad_accum_steps))
        if self.config.compile or self.config.initial_image_size is not None:
            # Use the size of this rank's first micro-batch. torch would compile again for another one, and with
            # --initial-image-size, a lack of memory for the largest images would show only in the last epochs.
            schedule, per_group = self.schedule, self.schedule.samples_per_group
            start, end = split_range(schedule.batch_size, self.group.rank, self.group.world_size, per_group)
            images = split_range(end - start, 0, self.config.grad_accum_steps, per_group)[1]
        blank = torch.zeros((images, channels, size, size), dtype=torch.uint8)
        sides = training_sizes(self.config, self.size) if self.config.compile else [self.size]
        try:
            for side in sorted(set(sides), reverse=True):
                self.heartbeat.beat("start")
                self.preprocess = replace(self.preprocess, size=side)
                with watch_operations() as self.unrepeatable, autocast(self.config, self.group.device):
                    logits = self.wrapped(self.preprocess(blank))
                    logits.float().sum().backward()
        except ValueError as error:
            # Batch normalization needs more than one value.
            raise SharedError(f"{self.config.model} cannot train on {images} images a rank ({error})") from error
        except RuntimeError as error:
            if self.config.compile and (reason := compiler_error(error)):
                raise SharedError(f"--compile does not work here: {reason}") from error
            if not (operation := operation_without_kernel(str(error))):
                raise
            mode = self.config.deterministic
            other = "warn" if self.config.deterministic == "error" else "off"
            raise SharedError(
                f"--deterministic {mode} does not work with {self.config.model} here: {operation} has no deterministic "
                f"kernel: use --deterministic {other}"
            ) from error
        model.zero_grad()
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])

    def step(self, batch: Batch, loss_meter: LossMeter) -> None:
        """Make one optimizer step.

        DDP and FSDP average gradients over the ranks. Each rank's loss is scaled so that this average is the mean over
        the global batch, even if the ranks' shares differ. With gradient accumulation, DDP communicates only in the
        backward pass of the last micro-batch.
        """
        config, state, progress = self.config, self.state, self.state.progress
        optimizer, scaler = state.optimizer, state.scaler
        seed_generators(self.group.device, derive_key(config.seed, Purpose.STEP, progress.step, self.group.rank))
        # Set the mode only after an evaluation: to visit all modules takes half a millisecond.
        if not state.model.training:
            set_train_mode(state.model)
        set_learning_rate(optimizer, learning_rate(config, self.schedule.steps_per_epoch, progress))
        size = size_in_epoch(config, self.size, progress.epoch)
        if size != self.preprocess.size:
            self.preprocess = replace(self.preprocess, size=size)
        mix = draw_mix(config, progress.step, self.preprocess.size)
        micro_batches = config.grad_accum_steps
        for index in range(micro_batches):
            start, end = split_range(len(batch.labels), index, micro_batches, self.schedule.samples_per_group)
            with nullcontext() if index == micro_batches - 1 else postpone_reduction(self.wrapped):
                loss, correct = self._loss(batch.images[start:end], batch.labels[start:end], mix)
                if self.fault.inject("loss", progress.step + 1, self.group.rank):
                    loss = loss * math.nan
                scaled = scaler.scale(loss * (self.group.world_size / self.schedule.batch_size))
                torch.autograd.backward(scaled)
            loss_meter.add(loss, correct)
        self.fault.inject("step", progress.step + 1, self.group.rank)
        state.wait_for_copies()
        if config.clip_grad_norm:
            # The norm must not depend on the loss scale.
            scaler.unscale_(optimizer)
            clip_grad_norm_(state.model.parameters(), config.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss_meter.add_images(self.schedule.batch_size)
        progress.advance(self.schedule.batch_size, self.schedule.samples_per_epoch)
        if state.ema:
            state.ema.update(progress.step)

    def _loss(self, images: Tensor, labels: Tensor, mix: Mixup | None) -> tuple[Tensor, Tensor]:
        """Return the sum of a micro-batch's losses, and the number of images predicted correctly.

        A mixed image has the class of its larger part, as in torchvision's references.
        """
        inputs = self.preprocess(images)
        with autocast(self.config, self.group.device):
            logits = self.wrapped(mix_images(mix, inputs) if mix else inputs)
        targets = labels.to(self.group.device, non_blocking=True)
        if mix:
            targets = mix_labels(mix, targets, logits.shape[1])
        expected = targets.argmax(1) if mix else targets
        return self.loss(logits.float(), targets), (logits.detach().argmax(1) == expected).sum()
