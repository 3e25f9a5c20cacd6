"""Attaches torchrelay's callback to the Trainer of Hugging Face in a script that does not. Runs in ranks of scripts.

That Trainer ignores SIGTERM, so a stop of the job would cost the steps since its last checkpoint. Lightning has no such
callback: only its user knows from which file a training continues.
"""

import os
import signal
import sys
import threading
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
    handler = getattr(trainer, "CallbackHandler", None)
    begin = getattr(handler, "on_train_begin", None)
    if handler is None or begin is None:
        return  # another version, whose scripts run as they are

    def begin_with_callback(self: Any, arguments: Any, state: Any, control: Any, **others: Any) -> Any:
        """Attach the callback after the script's own ones have begun: they may handle signals."""
        control = begin(self, arguments, state, control, **others)
        if _saves(arguments) and not _is_attached(self.callbacks) and _may_handle_signals():
            # Torchrelay is imported only now: its import handles the signals.
            from torchrelay.transformers import RelayTrainerCallback  # noqa: PLC0415

            callback = RelayTrainerCallback()
            self.add_callback(callback)
            print(_SAYS, file=sys.stderr, flush=True)
            callback.on_train_begin(arguments, state, control)
        return control

    handler.on_train_begin = begin_with_callback


def _saves(arguments: Any) -> bool:
    """Return whether the Trainer saves checkpoints, and can agree with the other ranks on when."""
    distributed = sys.modules["torch"].distributed  # the Trainer has imported torch
    return bool(arguments.save_strategy != "no" and (arguments.world_size == 1 or distributed.is_initialized()))


def _is_attached(callbacks: list[Any]) -> bool:
    """Return whether our callback is there: the script's, maybe of a copied library, or ours of an earlier `train`."""
    classes = (base for callback in callbacks for base in type(callback).__mro__)
    return any(base.__name__ == "RelayTrainerCallback" for base in classes)


def _may_handle_signals() -> bool:
    """Return whether this thread can handle SIGTERM, and the script does not. Torchrelay's handler only records it."""
    if threading.current_thread() is not threading.main_thread():
        return False
    saved = sys.modules.get("torchrelay.saved_state")
    if saved and saved.SavedState.active:
        return False  # the script asks should_stop(), which also agrees on the saves of the state
    relay = sys.modules.get("torchrelay.stop_signals")
    is_ours = relay is not None and relay.signals.is_installed()
    return is_ours or signal.getsignal(signal.SIGTERM) in {signal.SIG_IGN, signal.SIG_DFL}
