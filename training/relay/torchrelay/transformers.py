"""A callback for the Trainer of Hugging Face: agreed stops, and what `hpc status` shows. Runs on every rank.

For example::

    from torchrelay.transformers import RelayTrainerCallback

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[RelayTrainerCallback()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))

Where Slurm stops the job, the Trainer saves its own checkpoint of that step, with the position in the epoch, and the
ranks end with exit code 0. In a script that Torchrelay did not start, the callback does nothing.
"""

import time
from typing import Any

from transformers import TrainerCallback

from .library_training import LibraryTraining, exit_after_save
from .progress_files import progress_files
from .rank_exchange import ranks


class RelayTrainerCallback(TrainerCallback):  # type: ignore[misc]  # Transformers need not be installed
    """Has the Trainer save and end when Slurm stops the job, and reports what it logs."""

    def __init__(self) -> None:
        self._training = LibraryTraining()
        self._logged = 0, 0.0

    def on_train_begin(self, _arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        """Run when the Trainer has restored its checkpoint, if it has one."""
        self._logged = state.global_step, time.monotonic()
        self._training.begin(state.global_step, state.max_steps)

    def on_step_end(self, _arguments: Any, state: Any, control: Any, **_: Any) -> None:
        """Run after each step of the optimizer."""
        self._training.saves_after(state.global_step)
        if ranks.stopping:
            control.should_save = control.should_training_stop = True

    def on_save(self, _arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        """Run after each save: what the script does after its training is not for a training that goes on."""
        if ranks.stopping:
            exit_after_save(state.global_step)

    def on_log(self, arguments: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Report what the training logs. The Trainer also logs the numbers of evaluations, and a summary."""
        if "loss" not in logs:
            return
        (step, at), self._logged = self._logged, (state.global_step, time.monotonic())
        samples = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        seconds = self._logged[1] - at
        pace = {"samples_per_second": samples * (state.global_step - step) / seconds} if seconds else {}
        values = {"lr" if name == "learning_rate" else name: value for name, value in logs.items()}
        progress_files.report(state.global_step, {**values, **pace})
