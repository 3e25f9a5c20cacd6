"""Injects faults, for tests, drills and `training.verify_resume`. Runs on every rank; imports no torch."""

import os
import re
import signal
import time
from dataclasses import dataclass

from hpc.base.errors import UserError

# The place of each fault: `load` (before waiting for a batch), `boundary` (before a step), `step` (before the weights
# change), `save` (before a checkpoint is published), `evaluate` (before a batch), `loss` (which becomes nan), or
# `preflight` (its matrix product).
_PLACES = {
    "step": "step",
    "save": "save",
    "evaluate": "evaluate",
    "stop": "boundary",
    "hang": "step",
    "raise": "step",
    "oom": "step",
    "exit": "step",
    "slow": "load",
    "loss": "loss",
    "preflight": "preflight",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one rank. It happens when the rank reaches the fault's place at step `step` or later."""

    point: str
    """Kind of fault, a key of _PLACES."""
    step: int
    rank: int
    always: bool = False
    """Whether the fault also happens after torchrun has restarted the ranks, not only at their first start."""

    def __str__(self) -> str:
        """Return the text from which `parse_fault` makes this fault."""
        return f"{self.point}@{self.step}:{self.rank}{'!' if self.always else ''}"

    def inject(self, place: str, step: int, rank: int) -> bool:
        """Make the fault happen if this is its place, rank and step (or later). Return whether it did."""
        if place != _PLACES.get(self.point) or step < self.step or rank != self.rank:
            return False
        match self.point:
            case "step" | "save" | "evaluate":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            case "hang":
                _hang()
            case "raise":
                raise RuntimeError("failure injected by --fault")
            case "oom":
                from torch import OutOfMemoryError  # noqa: PLC0415  # takes seconds, unless in a training

                raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. (injected by --fault)")
            case "exit":
                # Exit as if the work were done.
                os._exit(0)
            case "slow":
                time.sleep(0.3)
        # For "preflight" and "loss", the caller falsifies its result.
        return True


def _hang() -> None:
    """Sleep forever. The stacks of the aborted rank show this function's name."""
    print("hanging (injected by --fault)", flush=True)
    while True:
        time.sleep(60)


NO_FAULT = Fault(point="", step=0, rank=-1)


def parse_fault(text: str) -> Fault:
    """Parse `POINT@STEP:RANK`, or `POINT@STEP:RANK!` for a fault at every start. An empty text means no fault.

    Raises UserError if the text has another form.
    """
    if not text:
        return NO_FAULT
    match = re.fullmatch(rf"({'|'.join(_PLACES)})@(\d+):(\d+)(!?)", text)
    if match is None:
        raise UserError(f"--fault is {text!r}: use POINT@STEP:RANK, with a point of {', '.join(_PLACES)}")
    return Fault(point=match[1], step=int(match[2]), rank=int(match[3]), always=bool(match[4]))
