"""What the callbacks for Lightning and Hugging Face share: starts, steps, agreed stops. Runs on every rank.

The library has the loop and its own checkpoints. The ranks agree after which step they save one, as with `should_stop`.
"""

import sys
from dataclasses import dataclass, field
from typing import NoReturn

from .progress_files import progress_files
from .rank_exchange import ranks
from .saving.interval import SaveTimes
from .stop_signals import signals
from .this_rank import THIS_RANK


@dataclass
class LibraryTraining:
    """A training in a library's loop. Without a run of Torchrelay, it does nothing."""

    checkpoint_times: SaveTimes = field(default_factory=SaveTimes)
    """The times of the checkpoints that the ranks agree on."""

    def begin(self, step: int, total_steps: int | None = None) -> None:
        """Show from which step the library's loop starts, and record the signals to stop instead of its handlers."""
        if THIS_RANK.run_dir is None:
            return
        signals.install()
        self.checkpoint_times.record(step)
        progress_files.begin(step)
        progress_files.event("train_started", step=step, total_steps=total_steps, world_size=THIS_RANK.world_size)

    def saves_after(self, step: int) -> bool:
        """Show that a step is done, and return whether all ranks save now. All ranks call this after each step.

        If `ranks.stopping` is set, they also exit when it is saved.
        """
        if THIS_RANK.run_dir is None:
            return False
        progress_files.beat(step)
        is_due = THIS_RANK.rank == 0 and self.checkpoint_times.due_by_time(0.0)
        agreed = ranks.agree("the callback of torchrelay", save=int(is_due))
        if agreed and agreed.save:
            self.checkpoint_times.record(step)
        return agreed is None or bool(agreed.save)


def exit_after_save(step: int) -> NoReturn:
    """End the rank: the ranks have agreed to stop, and the library has saved its checkpoint of `step`."""
    ranks.record_stop(step)
    sys.exit(0)
