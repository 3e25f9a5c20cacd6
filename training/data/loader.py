"""Loads batches in loader workers, and copies each to the device while the device computes the previous step.

Runs on every rank. A data set is indexed with a `BatchRequest`, so that one call makes a rank's part of a batch, in the
rank or in a loader worker. Data sets have no random state of their own.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, islice
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Semaphore
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hpc.base.files import DEV_SHM
from hpc.base.kernel import open_gpu_files
from training.data.batch_schedule import BatchRequest
from training.data.worker_process import die_with_parent
from training.runtime.compat import stop_workers


def release_freed_memory() -> None:
    """Return freed memory to the kernel before a fork.

    Otherwise, when the rank uses this memory again after the fork, the kernel copies it, and the worker keeps the old
    pages.
    """
    ctypes.CDLL(None).malloc_trim(0)


class Batch(NamedTuple):
    """The images and labels of a request. It is a tuple, so that a DataLoader can pin it."""

    images: Tensor
    """Pixels, uint8 [n, C, H, W], on the data set's device."""
    labels: Tensor
    """Labels of these images, int64 [n]."""
    indices: Tensor
    """Indices of the requested images in the data set, int64 [n], without repetition numbers."""
    corrupt: Tensor
    """Distinct indices of unreadable images, int64 [k]. Other images take their places in the batch."""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with images and labels on the device. The host does not wait for the copies."""
        return self._replace(images=to_device(self.images, device), labels=to_device(self.labels, device))


class ImageSource(Protocol):
    """A data set that returns images and labels on request."""

    @property
    def labels(self) -> Tensor:
        """Labels of all samples, int64 [n]."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, request: BatchRequest) -> Batch:
        """Return a request's images.

        Raises UserError if this node cannot read an image, or too many images in a row are corrupt.
        """

    def name(self, index: int) -> str:
        """Return an image's name for messages."""


# Slurm sends signals to all processes of a job step. A worker that died of a signal would end its rank before the rank
# has saved (KempnerInstitute/KempnerForge#177).
_IGNORED_BY_WORKERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_START_SECONDS = 30.0
_PREFETCHED = 2  # number of requests that a loader gives to each worker in advance


def _new_semaphore(context: BaseContext) -> Semaphore:
    try:
        return context.Semaphore(0)
    except OSError as error:  # the error does not say what is full
        raise OSError(error.errno, error.strerror, str(DEV_SHM)) from error


@contextmanager
def load_batches(
    source: ImageSource, requests: Iterable[BatchRequest], workers: int, *, pin_memory: bool
) -> Iterator[Iterator[Batch]]:
    """Yield the requested batches in order, made by `workers` processes or, with 0 workers, in this process.

    At the end of the context, workers are stopped: Python's own exit would send them SIGTERM, which they ignore, and
    wait for them. After an exception, they end with the process instead.
    """
    # A forked worker need not import torch again, which takes seconds.
    context = multiprocessing.get_context("fork")
    started = _new_semaphore(context) if workers else None
    loader: DataLoader[Any] = DataLoader(
        source,  # type: ignore[arg-type]  # a Dataset in all but its base class
        sampler=_Requests(requests, workers * _PREFETCHED),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_PREFETCHED if workers else None,
        multiprocessing_context=context if workers else None,
        pin_memory=pin_memory,
        worker_init_fn=partial(_start_worker, started) if started else None,
        # Without a generator of its own, the loader would draw from the global one, and resumed runs would differ.
        generator=torch.Generator(),
    )
    batches = _fork_workers(loader, started) if started else iter(loader)
    yield batches
    if workers:
        stop_workers(batches)


class _Requests:
    """Requests that `_fork_workers` can iterate again from the first one, if at most `first` of them were taken."""

    def __init__(self, requests: Iterable[BatchRequest], first: int) -> None:
        self._rest = iter(requests)
        self._first = list(islice(self._rest, first))

    def __iter__(self) -> Iterator[BatchRequest]:
        return chain(self._first, self._rest)


def _fork_workers(loader: "DataLoader[Any]", started: Semaphore) -> Iterator[Any]:
    """Start the loader's workers, and return its batches once all of them run."""
    release_freed_memory()
    while True:
        # Block the signals during the fork, because a worker could die of one before it ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_BY_WORKERS)
        # Freeze the rank's objects, so that workers do not collect them: destroying an object of a GPU aborts a forked
        # process (seen with torch 2.11 on an H200).
        gc.freeze()
        try:
            batches: Any = iter(loader)
        finally:
            gc.unfreeze()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        deadline = time.monotonic() + _START_SECONDS
        if all(started.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in range(loader.num_workers)):
            return cast("Iterator[Any]", batches)
        # Before Python 3.12, a child can hang in the fork if another thread, such as one of gloo's, begins to call
        # Python at that moment (python/cpython#112275; seen with 3.11.2 in our and in Lightning's workers).
        print(f"loader workers did not start within {_START_SECONDS:.0f} s: starting others", flush=True)
        for worker in stop_workers(batches):
            worker.kill()
            worker.join(_START_SECONDS)
        while started.acquire(block=False):
            pass  # do not count killed workers that had started


def _start_worker(started: Semaphore, _number: int) -> None:
    """Report that this worker runs, make it die with its rank, and close its copies of the rank's GPU files."""
    started.release()
    # torch's workers look for their parent only every five seconds. While they keep a dead rank's sockets open, the
    # other ranks wait for it.
    die_with_parent(_IGNORED_BY_WORKERS)
    # A killed worker that waits for storage outlives its rank. While it has the files open, the driver keeps the rank's
    # GPU memory from the next attempt (NVIDIA/Megatron-LM#3684).
    for descriptor in open_gpu_files():
        os.close(descriptor)


@contextmanager
def load_device_batches(
    device: torch.device, source: ImageSource, requests: Iterable[BatchRequest], workers: int
) -> Iterator[Iterator[Batch]]:
    """Yield the batches of `load_batches` with images and labels on a rank's device.

    A thread of the loader pins batches from workers. Without workers, a batch is pinned when it is copied.
    """
    on_gpu = device.type == "cuda"
    with load_batches(source, requests, workers, pin_memory=on_gpu and workers > 0) as batches:
        yield prefetch_to_device(batches, device) if on_gpu else batches


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return values on the device, copied through pinned memory. The host does not wait for the copy."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a device. All loaders share it, since other streams cannot reuse its memory."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches, each copied to the GPU while the GPU computes the previous step.

    Copies, and a data set's work on the GPU, run in a side stream. Each batch is requested one step early.
    """
    side = _side_stream(device)
    # The copy of a data set to the GPU may not be complete yet.
    side.wait_stream(torch.cuda.current_stream(device))
    ready = _begin_copy(batches, device, side)
    while ready is not None:
        current = torch.cuda.current_stream(device)
        # Wait before the next copy begins, so that the step waits only for this one.
        current.wait_stream(side)
        for tensor in (ready.images, ready.labels):
            # The side stream owns the tensor's memory, and must not reuse it before the step has used it.
            tensor.record_stream(current)
        batch, ready = ready, _begin_copy(batches, device, side)
        yield batch


def _begin_copy(batches: Iterator[Batch], device: torch.device, side: torch.cuda.Stream) -> Batch | None:
    with torch.cuda.stream(side):
        batch = next(batches, None)
        return None if batch is None else batch.to(device)
