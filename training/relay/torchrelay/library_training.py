"""What the callbacks for Lightning and Hugging Face share: starts, steps, agreed stops. Runs on every rank.

The library has the loop and its own checkpoints. The ranks agree after which step they save one, as with `should_stop`.
"""

import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import NoReturn

from .progress_files import progress_files
from .rank_exchange import ranks
from .stop_consensus import StepFlags, StopRequested
from .stop_signals import signals
from .this_rank import THIS_RANK


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks do after a step."""

    save: bool = False
    stop: bool = False


@dataclass
class LibraryTraining:
    """A training in a library's loop. Without a run of Torchrelay, it does nothing."""

    checkpoint_seconds: float = math.inf
    """The seconds between checkpoints that the ranks agree on."""
    _saved_at: float = field(default_factory=time.monotonic)

    def begin(self, step: int, total_steps: int | None = None) -> None:
        """Show from which step the library's loop starts, and record the signals to stop instead of its handlers."""
        if THIS_RANK.run_dir is None:
            return
        signals.install(signal.Signals[os.environ.get("TORCHRELAY_STOP_SIGNAL", "SIGTERM")])
        self._saved_at = time.monotonic()
        progress_files.begin(step)
        progress_files.event("train_started", step=step, total_steps=total_steps, world_size=THIS_RANK.world_size)

    def after_step(self, step: int) -> Agreed:
        """Show that a step is done, and return what all ranks do now. All ranks call this after each step."""
        if THIS_RANK.run_dir is None:
            return Agreed()
        progress_files.beat(step)
        is_due = THIS_RANK.rank == 0 and time.monotonic() - self._saved_at >= self.checkpoint_seconds
        consensus = ranks.connect("the callback of torchrelay")
        try:
            agreed = consensus.exchange(StepFlags(signal=signals.received(), save=int(is_due)))
        except StopRequested as request:
            ranks.stopping = request.name, signals.received_at() or time.monotonic()
            return Agreed(save=True, stop=True)
        if agreed.save:
            self._saved_at = time.monotonic()
        return Agreed(save=bool(agreed.save))


def exit_after_save(step: int) -> NoReturn:
    """End the rank: the ranks have agreed to stop, and the library has saved its checkpoint of `step`."""
    if ranks.stopping:
        name, requested_at = ranks.stopping
        seconds = round(time.monotonic() - requested_at, 3)
        progress_files.event("train_stopped", step=step, signal=name, seconds=seconds)
    sys.exit(0)
