"""Injected faults, for tests, drills and `training.verify_resume`. Runs on every rank; imports no torch."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hpc.core.errors import UserError

_SLOW_SECONDS = 0.3


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _hang() -> None:
    print("hanging (injected by --fault)", flush=True)
    while True:
        time.sleep(60)


def _raise() -> None:
    raise RuntimeError("failure injected by --fault")


def _run_out_of_memory() -> None:
    from torch import OutOfMemoryError  # noqa: PLC0415  # the import takes seconds; a training has done it already

    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. (injected by --fault)")


@dataclass(frozen=True)
class _Kind:
    place: str
    """Where it happens: `load` (waiting for a batch), `boundary` (before a step), `step` (between the gradients and the
    weights), `save` (between the files), `evaluate`, or `preflight` (its matrix product)."""
    act: Callable[[], object]


_KILL = partial(_send, signal.SIGKILL)
_KINDS = {
    "step": _Kind("step", _KILL),
    "save": _Kind("save", _KILL),
    "evaluate": _Kind("evaluate", _KILL),
    "stop": _Kind("boundary", partial(_send, signal.SIGTERM)),
    "hang": _Kind("step", _hang),
    "raise": _Kind("step", _raise),
    "oom": _Kind("step", _run_out_of_memory),
    # With exit code 0 and no message, as if the work were done.
    "exit": _Kind("step", partial(os._exit, 0)),
    "slow": _Kind("load", partial(time.sleep, _SLOW_SECONDS)),
    # The preflight itself falsifies its product when `inject` returns True.
    "preflight": _Kind("preflight", bool),
}
# Faults that cut a training such that it can resume.
POINTS = ("step", "save", "evaluate", "stop")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one rank, whenever that reaches the place of the fault at or after a step."""

    point: str
    """A key of _KINDS."""
    step: int
    rank: int
    always: bool = False
    """Also after torchrun has restarted the ranks; otherwise at their first start only."""

    def __str__(self) -> str:
        """The text that `parse_fault` reads."""
        return f"{self.point}@{self.step}:{self.rank}{'!' if self.always else ''}"

    def inject(self, place: str, step: int, rank: int) -> bool:
        """Make the fault happen if this is its place, step and rank, and return whether it did. It may end the rank."""
        kind = _KINDS.get(self.point)
        if kind is None or place != kind.place or step < self.step or rank != self.rank:
            return False
        kind.act()
        return True


NO_FAULT = Fault(point="", step=0, rank=-1)


def parse_fault(text: str) -> Fault:
    """Read `POINT@STEP:RANK`, or `POINT@STEP:RANK!` for every start of the ranks; empty text means no fault.

    Raises:
        UserError: the text is something else.
    """
    if not text:
        return NO_FAULT
    match = re.fullmatch(rf"({'|'.join(_KINDS)})@(\d+):(\d+)(!?)", text)
    if match is None:
        raise UserError(f"--fault is {text!r}: use POINT@STEP:RANK, with a point of {', '.join(_KINDS)}")
    return Fault(point=match[1], step=int(match[2]), rank=int(match[3]), always=bool(match[4]))
