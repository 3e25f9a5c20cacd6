"""Keeps freed memory in the process for the next step, and returns it before loader workers fork. Runs on every rank.

Each step on a CPU allocates and frees the same tensors. By default glibc returns much of the freed memory to the
kernel, which must clear its pages before the next use. How much glibc returns depends on the order of the first
allocations: one start of a training made up to 27,000 page faults a step; a second start made 400, and was 45 % faster
(small-cnn, 64 images of 64 pixels; docs/explanation/performance.md).
"""

import contextlib
import ctypes

# Parameters and values of mallopt(3). _LARGEST_BYTES is the largest mmap threshold that glibc accepts.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST_BYTES = 2**31 - 1, 32 * 2**20


def keep_freed_memory() -> None:
    """Let glibc keep freed memory and reuse it for tensors of up to 32 MiB. Do nothing with another C library."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def release_freed_memory() -> None:
    """Return freed memory to the kernel before a fork. Do nothing if the C library is not glibc.

    Otherwise, when the rank uses this memory again after the fork, the kernel copies it, and the worker keeps the old
    pages.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
