"""Wraps each private name of torch or Python that training needs. "Read in" names the versions whose code was read.

tests/training/runtime/test_compat_torch.py finds names that a new version lacks. Runs on every rank, and in torchrun in
a user's Python, so it imports only torch and the standard library. Imports that take a second are in functions.
"""
# ruff: noqa: PLC0415

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # torch 2.11, 2.15: the base of all batch norms

__all__ = ["BatchNorm"]


def copy_each(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy many tensors with few kernels, as torch.optim does. Read in torch 2.11 and 2.15."""
    torch._foreach_copy_(into, values)


def average_each(averages: list[Tensor], values: list[Tensor], weight: float) -> None:
    """Move averages towards values by `weight` with few kernels, as torch.optim does. Read in torch 2.11 and 2.15."""
    torch._foreach_lerp_(averages, values, weight)


def scaler_tensors(scaler: GradScaler) -> tuple[Tensor | None, Tensor | None]:
    """Return scale and growth tracker on the device, (None, None) before the first step. Read in torch 2.11 and 2.15.

    The public `state_dict` waits for the device.
    """
    return scaler._scale, scaler._growth_tracker


def stop_workers(batches: Any) -> Sequence[Any]:
    """Stop the workers of a DataLoader's iterator, and return their processes. Read in torch 2.11 and 2.15.

    The iterator's destructor does the same, but at an unknown time.
    """
    batches._shutdown_workers()
    workers: Sequence[Any] = batches._workers
    return workers


def use_deterministic_algorithms(mode: bool, *, warn_only: bool = False) -> None:
    """Do what torch's function of this name does, but do not import the compiler. Read in torch 2.11 and 2.15.

    `compile_training` gives the compiler its own flag.
    """
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


def configure_compiler(cores: int, max_shapes: int) -> None:
    """Let torch compile for up to `max_shapes` shapes, in at most `cores` processes. Read in torch 2.11 and 2.15."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    # torch's default is all of the machine's cores, up to 32.
    inductor.compile_threads = max(1, min(cores, inductor.compile_threads or cores))
    dynamo.recompile_limit = max_shapes


def default_compiler_directory() -> str:
    """Return the directory that torch writes into TORCHINDUCTOR_CACHE_DIR at an import. Read in torch 2.11 and 2.15."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def is_compiler_error(error: RuntimeError) -> bool:
    """Return whether an error says that a compiler failed or is missing. Read in torch 2.11 and 2.15."""
    from torch._dynamo.exc import ShortenTraceback

    return isinstance(error, ShortenTraceback)


def end_ranks_within(seconds: int, then: Callable[[], None]) -> None:
    """Have torchrun kill ranks `seconds` after it told them to end, and then call `then`.

    Read in torch 2.11 and 2.15: torchrun ends ranks only by `PContext.close`, which would give them 30 s.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def close_ranks(ranks: PContext, death_sig: Any = None, timeout: int = 0) -> None:  # noqa: ARG001
        close(ranks, death_sig, seconds)
        then()

    PContext.close = close_ranks  # type: ignore[assignment]


def log_failures_without_compiler() -> None:
    """Format the exception that torchrun logs when a rank fails. Read in torch 2.11 and 2.15.

    torch's own formatter imports the compiler first, to read a setting. This would delay the first restart by a second.
    """
    from torch.distributed.elastic.multiprocessing import api

    formatter = logging.Formatter()

    def format_exception(record: logging.LogRecord) -> bool:
        if record.exc_info:
            record.exc_text, record.exc_info = formatter.formatException(record.exc_info), None
        return True

    api.logger.addFilter(format_exception)


def leave_signals_alone() -> None:
    """Keep a torchrun that has no `signals_to_handle` from handling SIGTERM. Read in torch 2.4 to 2.8.

    Its handler would end the ranks before they can save, and a forked rank would inherit it.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.launcher.api import LaunchConfig

    if hasattr(LaunchConfig, "signals_to_handle"):
        return

    def start(self: Any) -> None:
        self._start()
        self._stdout_tail.start()
        self._stderr_tail.start()

    PContext.start = start  # type: ignore[method-assign]


def run_exit_functions() -> None:
    """Run the registered atexit functions, which `os._exit` would skip. Read in Python 3.11."""
    import atexit

    atexit._run_exitfuncs()
