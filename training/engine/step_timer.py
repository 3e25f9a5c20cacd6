"""Measures a rank's step times and the time of its own work, to tell a slow rank from the ranks that wait for it.

Runs on every rank. With DDP, every rank's step takes as long as the slowest rank's step. So each rank also times its
own work: the wait for its batch, and the model's forward pass. Parts that wait for other ranks are left out: DDP's
broadcast of buffers before the forward pass, and the backward pass, which exchanges gradients.
"""

import time
from collections import deque
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from torch import nn

from training.data.loader import Batch
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext
from training.runtime.train_progress import Progress

# A point in time: seconds on a CPU; on a GPU, an event in its queue that gets a time once the GPU reaches it.
_Mark = float | torch.cuda.Event


class StepTimer:
    """Times a rank's steps without making its device wait, and hands the mean times to the heartbeat."""

    def __init__(self, context: RunContext, group: ProcessGroup, model: nn.Module) -> None:
        self._heartbeat, self._fault, self._rank = context.heartbeat, context.fault, group.rank
        self._on_gpu = group.device.type == "cuda"
        self._began = 0.0
        self.loading_seconds = 0.0
        """Seconds that this rank waited for the last batch."""
        self._entered: _Mark = 0.0
        self._forwards: list[tuple[_Mark, _Mark]] = []
        self._unread: deque[tuple[float, float, list[tuple[_Mark, _Mark]]]] = deque()
        """For each step that is not read yet: its seconds, seconds of loading, and marks of forward passes."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=10)
        """For each recent step: its seconds, and the seconds of this rank's own work."""
        # With SyncBN or FSDP, the forward pass waits for other ranks, so only the loading counts as own work.
        if not context.config.sync_bn and context.config.strategy == "ddp":
            model.register_forward_pre_hook(self._enter)
            model.register_forward_hook(self._leave)

    def _enter(self, model: nn.Module, _inputs: Any) -> None:
        if model.training:
            self._entered = self._mark()

    def _leave(self, model: nn.Module, _inputs: Any, _output: Any) -> None:
        if model.training:
            self._forwards.append((self._entered, self._mark()))

    def batches(self, batches: Iterator[Batch], progress: Progress) -> Iterator[Batch]:
        """Yield the batches. The time of a step starts before the wait for its batch."""
        while True:
            self._heartbeat.beat("load", progress.step)
            self._began = time.perf_counter()
            self._fault.inject("load", progress.step + 1, self._rank)
            batch = next(batches, None)
            if batch is None:
                return
            self.loading_seconds = time.perf_counter() - self._began
            self._heartbeat.beat("step", progress.step)
            # Drop forward passes of the warm-up.
            self._forwards = []
            yield batch

    def step_done(self) -> None:
        """Record a step that the CPU has finished. The device may still be computing it."""
        wall = time.perf_counter() - self._began
        self._unread.append((wall, self.loading_seconds, self._forwards))
        while self._unread:
            wall, loading, forwards = self._unread[0]
            seconds = [_seconds_between(start, end) for start, end in forwards]
            measured = [value for value in seconds if value is not None]
            if len(measured) < len(seconds):
                break
            self._unread.popleft()
            self._recent.append((wall, loading + sum(measured)))
        if self._recent:
            walls, busies = zip(*self._recent, strict=True)
            self._heartbeat.step_seconds, self._heartbeat.busy_seconds = fmean(walls), fmean(busies)

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _seconds_between(start: _Mark, end: _Mark) -> float | None:
    """Return the seconds between two marks, or None if the device has not reached `end`."""
    if isinstance(start, float):
        assert isinstance(end, float)  # noqa: S101  # marks of one device are of one kind
        return end - start
    assert isinstance(end, torch.cuda.Event)  # noqa: S101
    return start.elapsed_time(end) / 1000 if end.query() else None  # type: ignore[no-untyped-call]
