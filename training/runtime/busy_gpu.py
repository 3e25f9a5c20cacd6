"""Waits for a GPU that another process still holds, before its node is blamed. Runs on every rank.

A killed process keeps its memory until the driver has destroyed its context, which takes seconds; in compute mode
EXCLUSIVE_PROCESS it holds the whole GPU until then. No test has met a busy GPU yet (docs/gpu.md).
"""

import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hpc.base.errors import BadNodeError

T = TypeVar("T")

# Errors of CUDA and its libraries that may go away. The last one occurs while a node's NVSwitches start.
_PASSING = re.compile(r"out of memory|STATUS_ALLOC_FAILED|busy or unavailable|system not yet initialized")
_LIMIT_SECONDS, _PAUSE_SECONDS = 60.0, 2.0
# More memory than the preflight and NCCL's first buffers take.
_FIRST_BYTES = 2**30
_INITIALIZE_DRIVER = (sys.executable, "-c", "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))")
_NVIDIA_SMI = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader")


def passes(message: str) -> bool:
    """Return whether a CUDA error may go away by itself, for example when another process ends."""
    return _PASSING.search(message) is not None


def wait_while_busy(device: torch.device, use: Callable[[], T]) -> T:
    """Call `use`, and return its result. After an error that may pass (`passes`), call it again for up to a minute.

    Raises:
        BadNodeError: the error has not passed after a minute, for example because another process holds the GPU.
    """
    deadline, warned = time.monotonic() + _LIMIT_SECONDS, False
    while True:
        try:
            return use()
        except RuntimeError as error:
            message = str(error).strip().partition("\n")[0]
            if not passes(message):
                raise
            if time.monotonic() > deadline:
                text = f"{platform.node()} cannot use its GPUs: after {_LIMIT_SECONDS:.0f} s still {message}"
                raise BadNodeError(text + _users_of(device)) from error
            if not warned:
                _warn(f"{platform.node()}: {message}{_users_of(device)}: trying again for {_LIMIT_SECONDS:.0f} s")
                warned = True
        # Sleep outside the handler: inside it, the exception would keep alive what `use` allocated.
        time.sleep(_PAUSE_SECONDS)


def occupy(gpu: torch.device) -> None:
    """Create this process's context on its GPU, and check that 1 GiB is free. Raises RuntimeError if that fails."""
    torch.cuda.set_device(gpu)
    torch.empty(_FIRST_BYTES, dtype=torch.uint8, device=gpu)
    torch.cuda.empty_cache()


def driver_recovers(problem: str) -> bool:
    """Return whether the driver, which refused this process because of `problem`, accepts a new one within a minute.

    Each try is a new process, since the driver keeps refusing a process that it has refused once.
    """
    _warn(f"{platform.node()}: {problem}: asking the driver again for {_LIMIT_SECONDS:.0f} s")
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline:
        if subprocess.run(_INITIALIZE_DRIVER, check=False).returncode == 0:
            return True
        time.sleep(_PAUSE_SECONDS)
    return False


def _users_of(device: torch.device) -> str:
    """Return a phrase that names the processes on a GPU, or an empty text if nvidia-smi names none."""
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's type lacks `uuid`
    found = processes_on(str(properties.uuid))
    return f" ({device} is used by {', '.join(found)})" if found else ""


def processes_on(uuid: str) -> list[str]:
    """Return the processes that have memory on a GPU, such as `PID 4711 (812 MiB)`; none if nvidia-smi fails.

    In a container, processes outside it are not seen.
    """
    try:
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines() if uuid in line]
    return [f"PID {pid} ({memory})" for _, pid, memory in rows]


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
