"""Lets loader workers make batches, and copies each batch to the device while the step before it computes.

Runs on every rank. A data set is indexed with a `BatchRequest`, so that one call makes one rank's part of a batch, in
the rank or in a loader worker. No data set draws random numbers itself.
"""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, islice
from multiprocessing.synchronize import Semaphore
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hpc.base.kernel import open_files
from training.data.batch_schedule import BatchRequest
from training.data.worker_process import die_with_parent
from training.runtime.compat import stop_workers


class Batch(NamedTuple):
    """The answer to a request. A loader can pin it, because it is a tuple."""

    images: Tensor
    """uint8 [n, C, H, W], on the data set's device."""
    labels: Tensor
    """int64 [n]: the labels of the images that are shown."""
    indices: Tensor
    """int64 [n]: the requested images' indices in the data set, without the numbers of repetitions."""
    corrupt: Tensor
    """int64 [k]: the indices, each once, of images that cannot be read; others are shown instead."""


class ImageSource(Protocol):
    """Gives images and labels on request."""

    @property
    def labels(self) -> Tensor:
        """Labels of all samples, int64 [n]."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, request: BatchRequest) -> Batch:
        """Return a request's images.

        Raises:
            UserError: this node cannot read them, or too many of them in a row are corrupt.
        """

    def name(self, index: int) -> str:
        """Name an image in a message."""


# Slurm delivers a step's signals to all its processes. A worker that died of one would take the rank down with it
# before the rank has saved (KempnerInstitute/KempnerForge#177).
_IGNORED_BY_WORKERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
# A worker that is stuck in storage outlives its rank, even if killed. While it has these files open, the driver keeps
# the rank's GPU memory, and the next attempt has too little (NVIDIA/Megatron-LM#3684). Workers use no GPU.
_GPU_FILES = "/dev/nvidia"
_START_SECONDS = 30.0
_PREFETCHED = 2  # requests that a loader gives to each worker in advance


@contextmanager
def load_batches(
    source: ImageSource, requests: Iterable[BatchRequest], workers: int, *, pin_memory: bool
) -> Iterator[Iterator[Batch]]:
    """Yield the requested batches in order, made by `workers` processes or, with 0, in this one.

    Workers end with the context. After an exception they end with the process, which has no time to wait for them. If
    the context did not end them, Python would send them SIGTERM, which they ignore, and wait for them.
    """
    # A forked worker need not import torch again, which takes seconds.
    context = multiprocessing.get_context("fork")
    started = context.Semaphore(0)
    loader: DataLoader[Any] = DataLoader(
        source,  # type: ignore[arg-type]  # a Dataset in all but its base class
        sampler=_Requests(requests, workers * _PREFETCHED),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_PREFETCHED if workers else None,
        multiprocessing_context=context if workers else None,
        pin_memory=pin_memory,
        worker_init_fn=partial(_start_worker, started),
        # Without its own generator a loader draws from the global one, and resumed runs would drift.
        generator=torch.Generator(),
    )
    batches = _fork_workers(loader, started) if workers else iter(loader)
    yield batches
    if workers:
        stop_workers(batches)


class _Requests:
    """Requests that can be iterated over again, as long as none after the first `first` of them has been taken."""

    def __init__(self, requests: Iterable[BatchRequest], first: int) -> None:
        self._rest = iter(requests)
        self._first = list(islice(self._rest, first))

    def __iter__(self) -> Iterator[BatchRequest]:
        return chain(self._first, self._rest)


def _fork_workers(loader: "DataLoader[Any]", started: Semaphore) -> Iterator[Any]:
    """Start the loader's workers, and return its batches once all of them run."""
    while True:
        # Fork workers with the signals blocked, because one could die before it ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_BY_WORKERS)
        # A worker must not collect the rank's garbage: to destroy what belongs to a GPU aborts a forked process
        # (seen with torch 2.11 on an H200).
        gc.freeze()
        try:
            batches: Any = iter(loader)
        finally:
            gc.unfreeze()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        deadline = time.monotonic() + _START_SECONDS
        if all(started.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in range(loader.num_workers)):
            return cast("Iterator[Any]", batches)
        # Before Python 3.12 a child can hang in the fork for ever, if another thread, such as one of gloo's, begins to
        # call Python at that moment (python/cpython#112275; seen with 3.11.2 in our and in Lightning's workers).
        print(f"loader workers did not start within {_START_SECONDS:.0f} s: starting others", flush=True)
        for worker in stop_workers(batches):
            worker.kill()
            worker.join(_START_SECONDS)
        while started.acquire(block=False):
            pass  # forget the killed workers that had started


def _start_worker(started: Semaphore, _number: int) -> None:
    """Report that this new worker runs, let it die with the rank, and close the rank's GPU files in it."""
    started.release()
    # torch's workers check for their parent every five seconds only. As long as they keep a dead rank's sockets open,
    # the other ranks wait for it.
    die_with_parent(_IGNORED_BY_WORKERS)
    for descriptor in open_files(_GPU_FILES):
        os.close(descriptor)


@contextmanager
def load_device_batches(
    device: torch.device, source: ImageSource, requests: Iterable[BatchRequest], workers: int
) -> Iterator[Iterator[Batch]]:
    """Yield the batches of `load_batches` with images and labels on a rank's device.

    A thread of the loader pins workers' batches; without workers, a batch is pinned when it is copied.
    """
    on_gpu = device.type == "cuda"
    with load_batches(source, requests, workers, pin_memory=on_gpu and workers > 0) as batches:
        yield prefetch_to_device(batches, device) if on_gpu else batches


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to the device through pinned memory; the host does not wait for the copy."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of all loaders: a batch's memory belongs to its stream, and no other stream reuses it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches, each copied to the GPU while the step before it computes.

    Copies run in a side stream, and so does a data set's work on the GPU. Each batch is requested one step early.
    """
    side = _side_stream(device)
    # A data set on the GPU may still be on its way there.
    side.wait_stream(torch.cuda.current_stream(device))
    ready = _begin_copy(batches, device, side)
    while ready is not None:
        current = torch.cuda.current_stream(device)
        # Wait before the next copy begins: the step has to wait for this copy alone.
        current.wait_stream(side)
        for tensor in (ready.images, ready.labels):
            # Their memory belongs to the side stream, which must not reuse it before the step is done with it.
            tensor.record_stream(current)
        batch, ready = ready, _begin_copy(batches, device, side)
        yield batch


def _begin_copy(batches: Iterator[Batch], device: torch.device, side: torch.cuda.Stream) -> Batch | None:
    with torch.cuda.stream(side):
        batch = next(batches, None)
        if batch is None:
            return None
        return batch._replace(images=to_device(batch.images, device), labels=to_device(batch.labels, device))
