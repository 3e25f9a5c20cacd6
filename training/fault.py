"""Deaths on order, for tests and `training.verify_resume`. Runs on every rank."""

import os
import re
import signal
from dataclasses import dataclass

from hpc.errors import UserError

# Where a rank can die, and of what: between the gradients and the weights, between the files of a checkpoint, in the
# middle of an evaluation; or be asked to stop.
_SIGNALS = {"step": signal.SIGKILL, "save": signal.SIGKILL, "evaluate": signal.SIGKILL, "stop": signal.SIGTERM}
POINTS = tuple(_SIGNALS)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A rank sends itself a signal, the first time that it gets to a point at or after a step."""

    point: str
    step: int
    rank: int

    def __str__(self) -> str:
        """As `parse_fault` reads it."""
        return f"{self.point}@{self.step}:{self.rank}"

    def strike(self, point: str, step: int, rank: int) -> None:
        """Be at a point of a step, which may be the end."""
        if point == self.point and step >= self.step and rank == self.rank:
            os.kill(os.getpid(), _SIGNALS[point])


NO_FAULT = Fault(point="", step=0, rank=-1)


def parse_fault(text: str) -> Fault:
    """Read `POINT@STEP:RANK`; nothing means no fault.

    Raises:
        UserError: the text is something else.
    """
    if not text:
        return NO_FAULT
    match = re.fullmatch(rf"({'|'.join(POINTS)})@(\d+):(\d+)", text)
    if match is None:
        raise UserError(f"--fault is {text!r}: use POINT@STEP:RANK, with a point of {', '.join(POINTS)}")
    return Fault(point=match[1], step=int(match[2]), rank=int(match[3]))
