"""Counts the optimizer steps of a script in memory that its rank shares with the agent. Runs in ranks and agents.

The script needs nothing of ours: torch calls a hook after each step of any optimizer. The hook only adds 1 to a number
in a file that is mapped into memory, so that the count is right even if the rank is killed. It reads no tensor and
keeps no optimizer. The agent sees the number, and how fast it grows.

A count begins at 0 in each process: which state the script has restored is unknown.
"""

import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from mmap import mmap
from struct import Struct
from struct import error as StructError  # noqa: N812
from types import ModuleType
from typing import Any, NamedTuple

_OPTIMIZER = "torch.optim.optimizer"
# The process id, the rank, the number of steps, and when the first and the last one ended, in nanoseconds. The number
# of steps is whole at any time: 8 bytes are written at once.
_LAYOUT = Struct("=5q")
_STEPS, _FIRST, _LAST = 2, 3, 4
_UNKNOWN = -1


def counter_file(heartbeat: str) -> str:
    """Return the file of the count of a rank with this file for heartbeats."""
    return f"{heartbeat}.steps"


class StepCount(NamedTuple):
    """The optimizer steps that a process has done."""

    pid: int
    rank: int
    steps: int
    first: int = 0
    last: int = 0

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds per step; None before the second one."""
        return (self.last - self.first) / (self.steps - 1) / 1e9 if self.steps > 1 else None


def read_count(heartbeat: str) -> StepCount | None:
    """Return the count of the last process that counted; None if no step is counted."""
    try:
        with open(counter_file(heartbeat), "rb") as file:  # noqa: PTH123 - fast, five times a second for each rank
            count = StepCount(*_LAYOUT.unpack(file.read(_LAYOUT.size)))
    except (OSError, StructError):
        return None  # there is none, or its process has just begun to make it
    return count if count.steps > 0 else None


class StepCounter:
    """Counts this process's optimizer steps. Optimizers that step in turn are one step, as in a GAN."""

    def __init__(self, heartbeat: str, rank: int) -> None:
        """Make the file of the count. Raises OSError if there is no space for it."""
        path = counter_file(heartbeat)
        hidden = f"{path}.{os.getpid()}"
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Without reserved memory, the write of a step would kill this process if the node's memory is full.
            os.posix_fallocate(descriptor, 0, _LAYOUT.size)
            self._words = memoryview(mmap(descriptor, _LAYOUT.size)).cast("q")
        finally:
            os.close(descriptor)
        self._words[0], self._words[1] = os.getpid(), rank
        os.replace(hidden, path)  # noqa: PTH105 - a text, as the environment has it
        self._done = 0
        self._stepped = set[int]()
        """The ids of the optimizers that have stepped since the count grew."""

    def attach(self, module: ModuleType) -> Any:
        """Count from now on, until the returned handle is removed. `module` is torch's module of optimizers."""
        handle = module.register_optimizer_step_post_hook(self._count)
        os.register_at_fork(after_in_child=handle.remove)
        return handle

    def _count(self, optimizer: object, _args: Any, _kwargs: Any) -> None:
        """Count a step if this optimizer has stepped since the last one."""
        if self._done == _UNKNOWN:
            return
        if id(optimizer) in self._stepped:
            self._stepped.clear()
        if not self._stepped:
            self._words[_STEPS] = self._done = _UNKNOWN if _is_recorded() else self._done + 1
            self._words[_LAST] = time.monotonic_ns()
            self._words[_FIRST] = self._words[_FIRST] or self._words[_LAST]
        self._stepped.add(id(optimizer))


def _is_recorded() -> bool:
    """Return whether a CUDA graph records what this process computes now: its steps are repeated without the hook."""
    cuda = sys.modules["torch"].cuda
    try:
        # In this order: without a GPU, the second question is an error.
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())
    except RuntimeError:
        return True  # CUDA answers no question while another thread records


class _AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, name: str, act: Callable[[ModuleType], object]) -> None:
        self._name, self._act = name, act

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """Return the module's usual spec, with a loader that also calls the function; None for other modules."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                load(module)
                self._act(module)

            spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


def after_import(name: str, act: Callable[[ModuleType], object]) -> None:
    """Call `act` with a module: now if this process has imported the module, else as soon as it has done so."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, act))


def count_steps(heartbeat: str, rank: int) -> None:
    """Count the optimizer steps of this process from now on. Without space for the count, they are not counted."""
    try:
        counter = StepCounter(heartbeat, rank)
    except OSError:
        return  # as with heartbeats, the script must not notice
    after_import(_OPTIMIZER, counter.attach)
