"""A callback for PyTorch Lightning: agreed stops, checkpoints, and what `hpc status` shows. Runs on every rank.

For example::

    from torchrelay.lightning import RelayCallback

    relay = RelayCallback()
    trainer = Trainer(callbacks=[relay], ...)
    trainer.fit(model, StatefulDataLoader(...), ckpt_path=relay.checkpoint)

The position in an epoch is a part of Lightning's checkpoint if the loader has `state_dict`, as torchdata's
StatefulDataLoader has. In a script that Torchrelay did not start, the callback does nothing.
"""

import time
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import cuda

from .checkpoint_files import find_published, publish, remove_unpublished, unpublished_name
from .compat import lightning_loader
from .library_training import LibraryTraining, exit_after_save
from .progress_files import progress_files
from .rank_exchange import ranks
from .saving.interval import SaveTimes, check_numbers
from .saving.values import deserialized, random_states, restore_random, serialized
from .this_rank import THIS_RANK, check_no_later_attempt

# The training waits while it saves, which takes at most this share of the time, unless saves are already this rare.
_MAX_OVERHEAD, _MAX_SECONDS = 0.01, 600.0


class RelayCallback(Callback):  # type: ignore[misc]  # Lightning need not be installed
    """Saves Lightning's checkpoint at times and when Slurm stops the job, and then ends the ranks with exit code 0."""

    def __init__(self, *, checkpoint_seconds: float = 30.0) -> None:
        """Save every `checkpoint_seconds`, and a large checkpoint more rarely: a crash costs the steps since then.

        Saving takes at most 1 % of the time, unless the saves are 10 minutes apart. A stop of the job costs no step.
        """
        check_numbers("RelayCallback", checkpoint_seconds=checkpoint_seconds)
        self._training = LibraryTraining(SaveTimes(seconds=checkpoint_seconds, max_overhead=_MAX_OVERHEAD))
        self._step = 0
        # Lightning does not save the states of random number generators. Each rank has its own.
        self._random = list[bytes]()

    @property
    def _file(self) -> Path | None:
        return THIS_RANK.run_dir / "lightning.ckpt" if THIS_RANK.run_dir else None

    @property
    def checkpoint(self) -> Path | None:
        """The path of the run's checkpoint, for `ckpt_path`; None if the run has none yet."""
        return find_published(self._file) if self._file else None

    def on_load_checkpoint(self, trainer: Any, _module: Any, checkpoint: dict[str, Any]) -> None:
        """Tell the sampler its epoch: Lightning does so too late for an interrupted epoch, whose loader has begun."""
        sampler = getattr(lightning_loader(trainer), "sampler", None)
        if set_epoch := getattr(sampler, "set_epoch", None):
            set_epoch(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        """Replace Lightning's handler of SIGTERM, which ends the training before anything is saved."""
        self._step = trainer.global_step
        total = trainer.estimated_stepping_batches
        self._training.begin(self._step, int(total) if 0 < total < float("inf") else None)

    def state_dict(self) -> dict[str, Any]:
        """Return a part of Lightning's checkpoint: the states of the random number generators of all ranks."""
        return {"random": self._random}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states from a checkpoint, for the first step."""
        self._random = state_dict["random"]

    def on_train_batch_start(self, *_: Any) -> None:
        """Continue with this rank's random numbers. Other numbers of ranks have none that could continue."""
        if len(self._random) == THIS_RANK.world_size:
            restore_random(deserialized(self._random[THIS_RANK.rank]))
        self._random = []

    def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        """Act after each step of the optimizer, when no gradients wait to be accumulated."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._step % trainer.log_every_n_steps == 0:
            values = {"loss": outputs["loss"]} if isinstance(outputs, dict) and "loss" in outputs else {}
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            progress_files.report(self._step, {"epoch": trainer.current_epoch, "lr": lr, **values})
        if self._training.saves_after(self._step) and self._file:
            if cuda.is_initialized():  # type: ignore[no-untyped-call]
                cuda.synchronize()  # the rest of the step is no part of what saving costs
            began = time.monotonic()
            self._save(trainer, self._file)
            self._training.saved(self._step, min(time.monotonic() - began, _MAX_OVERHEAD * _MAX_SECONDS))
        if ranks.stopping:
            exit_after_save(self._step)

    def _save(self, trainer: Any, path: Path) -> None:
        """Save Lightning's checkpoint: a file, or a directory if all ranks write, as with ModelParallelStrategy."""
        peers = ranks.peers
        if peers.is_rank_zero:
            remove_unpublished(path.parent, path.name)
        temporary = path.with_name(peers.all_gather_json(unpublished_name(path).name)[0])
        self._random = peers.all_gather_bytes(serialized(random_states()))
        trainer.save_checkpoint(temporary)  # returns when all ranks have written
        self._random = []
        with peers.raise_together():
            if peers.is_rank_zero:
                publish(temporary, path, check_no_later_attempt)
