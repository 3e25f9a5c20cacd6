"""Measures a rank's step times, by which its node agent tells a hang. Runs on every rank."""

import time
from collections import deque
from collections.abc import Iterator
from statistics import fmean

from torchrelay.progress_files import Heartbeat

from training.data.loader import Batch
from training.runtime.train_progress import Progress


class StepTimer:
    """Times a rank's steps without making its device wait, and hands the mean time to the heartbeat."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._began = 0.0
        self.loading_seconds = 0.0
        """Seconds that this rank waited for the last batch."""
        self._recent = deque[float](maxlen=10)
        """The seconds of each recent step."""

    def batches(self, batches: Iterator[Batch], progress: Progress) -> Iterator[Batch]:
        """Yield the batches. The time of a step starts before the wait for its batch."""
        while True:
            self._heartbeat.beat("load", progress.step)
            self._began = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            self.loading_seconds = time.perf_counter() - self._began
            self._heartbeat.beat("step", progress.step)
            yield batch

    def step_done(self) -> None:
        """Record a step that the CPU has finished. The device may still be computing it."""
        self._recent.append(time.perf_counter() - self._began)
        self._heartbeat.step_seconds = fmean(self._recent)
