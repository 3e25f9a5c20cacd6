"""Injects faults, for tests, drills and `training.verify_resume`. Runs on every rank; imports no torch."""

import os
import re
import signal
import time
from dataclasses import dataclass

from hpc.base.errors import UserError

# The place of each fault: `load` (waiting for a batch), `boundary` (before a step), `step` (between the gradients and
# the weights), `save` (between the files), `evaluate`, or `preflight` (its matrix product).
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
    "preflight": "preflight",
}
# Faults that cut a training such that it can resume.
POINTS = ("step", "save", "evaluate", "stop")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one rank, which happens when the rank reaches the fault's place at or after a step."""

    point: str
    """A key of _PLACES."""
    step: int
    rank: int
    always: bool = False
    """True if it also happens after torchrun has restarted the ranks, not at their first start only."""

    def __str__(self) -> str:
        """The text that `parse_fault` reads."""
        return f"{self.point}@{self.step}:{self.rank}{'!' if self.always else ''}"

    def inject(self, place: str, step: int, rank: int) -> bool:
        """Make the fault happen at its place and rank, from its step on. Return whether it did; it may end the rank."""
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
                from torch import OutOfMemoryError  # noqa: PLC0415  # the import takes seconds; a training has done it

                raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. (injected by --fault)")
            case "exit":
                # Exit with code 0 and no message, as if the work were done.
                os._exit(0)
            case "slow":
                time.sleep(0.3)
        # The preflight falsifies its product itself.
        return True


def _hang() -> None:
    """Sleep for ever; an aborted rank's stacks show this function's name."""
    print("hanging (injected by --fault)", flush=True)
    while True:
        time.sleep(60)


NO_FAULT = Fault(point="", step=0, rank=-1)


def parse_fault(text: str) -> Fault:
    """Read `POINT@STEP:RANK`, or `POINT@STEP:RANK!` for every start of the ranks; empty text means no fault.

    Raises:
        UserError: the text is something else.
    """
    if not text:
        return NO_FAULT
    match = re.fullmatch(rf"({'|'.join(_PLACES)})@(\d+):(\d+)(!?)", text)
    if match is None:
        raise UserError(f"--fault is {text!r}: use POINT@STEP:RANK, with a point of {', '.join(_PLACES)}")
    return Fault(point=match[1], step=int(match[2]), rank=int(match[3]), always=bool(match[4]))
