"""Waits for a GPU that another process still holds, before its node is blamed. Runs on every rank.

A killed process keeps its memory until the driver has destroyed its context, which takes seconds; in compute mode
EXCLUSIVE_PROCESS it holds the whole GPU until then. No test has met a busy GPU yet (docs/gpu.md).
"""

import platform
import re
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from hpc.base.errors import BadNodeError

T = TypeVar("T")

# Errors of CUDA and its libraries that may go away. The last one occurs while a node's NVSwitches start.
_PASSING = re.compile(r"out of memory|STATUS_ALLOC_FAILED|busy or unavailable|system not yet initialized")
_LIMIT_SECONDS, _PAUSE_SECONDS = 60.0, 2.0
# More memory than the preflight and NCCL's first buffers take.
_FIRST_BYTES = 2**30


def wait_while_busy(use: Callable[[], T]) -> T:
    """Call `use`, and return its result. After an error that may pass, call it again for up to a minute.

    Raises BadNodeError if the error has not passed after a minute, for example because another process holds the GPU.
    """
    deadline = time.monotonic() + _LIMIT_SECONDS
    warned = False
    while True:
        try:
            return use()
        except RuntimeError as error:
            message = str(error).strip().partition("\n")[0]
            if not _PASSING.search(message):
                raise
            if time.monotonic() > deadline:
                raise BadNodeError(
                    f"{platform.node()} cannot use its GPUs: after {_LIMIT_SECONDS:.0f} s still {message} (there, "
                    "nvidia-smi shows which processes use them)"
                ) from error
            if not warned:
                warning = f"warning: {platform.node()}: {message}: trying again for {_LIMIT_SECONDS:.0f} s"
                print(warning, file=sys.stderr, flush=True)
                warned = True
        # Sleep outside the handler: inside it, the exception would keep alive what `use` allocated.
        time.sleep(_PAUSE_SECONDS)


def occupy(gpu: torch.device) -> None:
    """Create this process's context on its GPU, and check that 1 GiB is free. Raises RuntimeError if that fails."""
    torch.cuda.set_device(gpu)
    torch.empty(_FIRST_BYTES, dtype=torch.uint8, device=gpu)
    torch.cuda.empty_cache()
