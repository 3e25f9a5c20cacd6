"""Failures on order, for tests, drills and `training.verify_resume`. Runs on every rank; imports no torch."""

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
    print("hanging, as --fault asks for", flush=True)
    while True:
        time.sleep(60)


def _raise() -> None:
    raise RuntimeError("this is the failure that --fault asked for")


def _run_out_of_memory() -> None:
    from torch import OutOfMemoryError  # noqa: PLC0415  # takes seconds; whoever gets here has it

    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. (This is what --fault asked for.)")


@dataclass(frozen=True)
class _Kind:
    place: str
    """Where a rank must come by: the waiting for a batch, the boundary before a step, the middle of a step (between
    the gradients and the weights), the middle of a save (between the files), the middle of an evaluation, or the
    preflight's matrix product."""
    happens: Callable[[], object]


_KILL = partial(_send, signal.SIGKILL)
_KINDS = {
    "step": _Kind("step", _KILL),
    "save": _Kind("save", _KILL),
    "evaluate": _Kind("evaluate", _KILL),
    "stop": _Kind("boundary", partial(_send, signal.SIGTERM)),
    "hang": _Kind("step", _hang),
    "raise": _Kind("step", _raise),
    "oom": _Kind("step", _run_out_of_memory),
    # Without a word, as if the work were done.
    "exit": _Kind("step", partial(os._exit, 0)),
    "slow": _Kind("load", partial(time.sleep, _SLOW_SECONDS)),
    # The strike itself is enough: it falsifies the product.
    "preflight": _Kind("preflight", bool),
}
# Where a training can be cut such that it resumes.
POINTS = ("step", "save", "evaluate", "stop")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something goes wrong on one rank whenever it comes by a place at or after a step."""

    point: str
    step: int
    rank: int
    always: bool = False
    """Also when torchrun has started the ranks anew; otherwise at their first start alone."""

    def __str__(self) -> str:
        """As `parse_fault` reads it."""
        return f"{self.point}@{self.step}:{self.rank}{'!' if self.always else ''}"

    def strike(self, place: str, step: int, rank: int) -> bool:
        """Be at a place of a step, which may be the end. Returns whether the fault struck."""
        kind = _KINDS.get(self.point)
        if kind is None or place != kind.place or step < self.step or rank != self.rank:
            return False
        kind.happens()
        return True


NO_FAULT = Fault(point="", step=0, rank=-1)


def parse_fault(text: str) -> Fault:
    """Read `POINT@STEP:RANK`, or `POINT@STEP:RANK!` for every start of the ranks; nothing means no fault.

    Raises:
        UserError: the text is something else.
    """
    if not text:
        return NO_FAULT
    match = re.fullmatch(rf"({'|'.join(_KINDS)})@(\d+):(\d+)(!?)", text)
    if match is None:
        raise UserError(f"--fault is {text!r}: use POINT@STEP:RANK, with a point of {', '.join(_KINDS)}")
    return Fault(point=match[1], step=int(match[2]), rank=int(match[3]), always=bool(match[4]))
