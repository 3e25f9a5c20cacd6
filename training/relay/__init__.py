"""Makes a torchrun script resumable: `state` saves and restores, `report` shows the progress. Runs on every rank.

For example::

    from training.relay import report, state

    with state(model=model, optimizer=optimizer) as saved:  # restores them, and saves them while they change
        for epoch in saved.epochs(20):  # continues in the epoch
            sampler.set_epoch(epoch)
            for batch in saved.batches(loader):  # continues after the batches that were used; stops when Slurm does
                loss = train(batch)
                report(step=saved.step, loss=loss)

A loop of another shape counts `saved.step` itself, and asks `should_stop()` after each step.

This package imports nothing else of torchrelay: a project that runs where torchrelay is not installed has a copy of the
package, under the name `relay`. If no run of torchrelay has started the script, `should_stop` returns False, and the
others do nothing. More is in docs/tutorials/own-script.md.

Our own trainer uses the same stop signals, heartbeat, exchanges between ranks, files of checkpoints, and choice of the
newest one. This module does not import `torch`: that takes seconds, in which a signal would not be noticed.
"""

from typing import Any

from .object_states import Saveable
from .progress_files import progress_files
from .saved_state import SavedState, should_stop

__all__ = ["report", "should_stop", "state"]


def report(*, step: int, **numbers: Any) -> None:
    """Report how far the training is, for `hpc status`, `hpc report` and trackers, and so that a hang is noticed.

    Each rank that calls it shows that it is alive; rank 0 writes the numbers.

    Args:
        step: the optimizer steps done.
        numbers: such as `loss`, `images_per_second`, `epoch`, `lr`. The host waits for tensors of one element.
    """
    progress_files.beat(step)
    progress_files.metrics(step, numbers)


def state(
    *, checkpoint_seconds: float = 600.0, snapshot_seconds: float = 1.0, keep: int = 2, **objects: Saveable
) -> SavedState:
    """Keep these objects over interruptions. All ranks enter and leave the `with` block together.

    Entering restores the newest state that any rank can reach. `saved.step` is the number of steps that are done:
    `saved.batches(...)` counts it; a loop without it has to. `should_stop()`, which `saved.batches(...)` calls, takes
    the snapshots and checkpoints that are due. Leaving without an exception saves the last step. Modules, optimizers
    and schedulers are the same on all ranks (DDP), or in shards (FSDP2). Each rank saves its own state of all else,
    such as a loader, and of the random number generators of torch and Python.

    Args:
        checkpoint_seconds: the seconds between checkpoints in the run directory.
        snapshot_seconds: the seconds between snapshots in the memory of each node, from which the ranks go on if one of
            them dies. They are fewer if they would take more than 1 % of the time. 0: no snapshots.
        keep: how many checkpoints to keep.
        objects: each has `state_dict` and `load_state_dict`, and the same name in every attempt.
    """
    return SavedState(objects, checkpoint_seconds, snapshot_seconds, keep)
