"""Attaches torchrelay's callback to the Trainer of Hugging Face in a script that does not. Runs in ranks of scripts.

That Trainer ignores SIGTERM, so a stop of the job would cost the steps since its last checkpoint. Lightning has no such
callback: only its user knows from which file a training continues.
"""

import os
import signal
import sys
from types import ModuleType
from typing import Any

from hpc.base.environment import CALLBACKS
from jobs.ranks.script.step_counter import after_import

_SAYS = (
    "torchrelay: when Slurm stops the job, this Trainer saves its own checkpoint, and the run continues with it "
    f"({CALLBACKS}=off prevents that)"
)


def attach_callbacks() -> None:
    """Attach the callback once the script has imported the Trainer, unless the user has switched it off."""
    if os.environ.get(CALLBACKS) != "off":
        after_import("transformers.trainer", _attach)


def _attach(trainer: ModuleType) -> None:
    """Make every Trainer call our callback, too. `trainer` is the module that defines the class."""
    if not {"DEFAULT_CALLBACKS", "TrainerCallback"} <= vars(trainer).keys():
        return  # another version, whose scripts run as they are

    class Attached(trainer.TrainerCallback):  # type: ignore[misc, name-defined]
        """Is torchrelay's callback if the script saves checkpoints and handles no signal itself."""

        relay: Any = None

        def on_train_begin(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
            """Import torchrelay only now: its import handles the signals."""
            distributed = sys.modules["torch"].distributed  # the Trainer has imported torch
            is_connected = arguments.world_size == 1 or distributed.is_initialized()
            is_handled = signal.getsignal(signal.SIGTERM) not in {signal.SIG_IGN, signal.SIG_DFL}
            if arguments.save_strategy == "no" or is_handled or not is_connected:
                return
            from torchrelay.transformers import RelayTrainerCallback  # noqa: PLC0415

            self.relay = RelayTrainerCallback()
            print(_SAYS, file=sys.stderr, flush=True)
            self.relay.on_train_begin(arguments, state, control, **others)

    def passing_on(name: str) -> Any:
        def pass_on(self: Attached, *words: Any, **others: Any) -> None:
            if self.relay:
                getattr(self.relay, name)(*words, **others)

        return pass_on

    for name in ("on_step_end", "on_save", "on_log"):
        setattr(Attached, name, passing_on(name))
    trainer.DEFAULT_CALLBACKS.append(Attached)
