"""Makes a torchrun script resumable: `state` saves and restores, `report` shows the progress. Runs on every rank.

For example::

    from torchrelay import report, state

    with state(model=model, optimizer=optimizer) as saved:  # restores them, and saves them while they change
        for epoch in saved.epochs(20):  # begins with the epoch that was interrupted
            sampler.set_epoch(epoch)
            for batch in saved.batches(loader):  # continues after the used batches; exits if Slurm stops the job
                loss = train(batch)
                report(step=saved.step, loss=loss)

A loop that does not use `saved.batches` sets `saved.step` itself, and calls `should_stop()` after each step.

Every rank that torchrelay starts can import this package, whatever is installed in its environment: it imports no other
part of torchrelay. In a script that torchrelay did not start, `should_stop` returns False, and `report` and `state` do
nothing. docs/how-to/own-script.md says more.

Torchrelay's own trainer also uses parts of this package, such as stop signals, heartbeat and checkpoint files. This
module does not import `torch`: the import takes seconds, in which a signal would not be noticed.
"""

from typing import Any

from .progress_files import progress_files
from .saved_state import SavedState, should_stop
from .saving.objects import Saveable

__all__ = ["report", "should_stop", "state"]


def report(*, step: int, **numbers: Any) -> None:
    """Report the training's progress to `hpc status`, `hpc report` and trackers, and show that this rank is alive.

    Every rank may call this. The node agent notices if a rank's calls cease. Only rank 0 writes the numbers.

    Args:
        step: the number of optimizer steps done.
        numbers: values such as `loss`, `images_per_second`, `epoch`, `lr`: numbers, or tensors of one element. The
            host waits for a tensor on a GPU. Any other value is left out, with a warning.
    """
    progress_files.report(step, numbers)


def state(
    *, checkpoint_seconds: float = 600.0, snapshot_seconds: float = 0.5, keep: int = 2, **objects: Saveable
) -> SavedState:
    """Keep the state of `objects` across interruptions. All ranks enter and leave the `with` block together.

    Entering the block restores the newest state that any rank can read. `saved.step` is the number of steps done;
    `saved.batches(...)` increases it. `should_stop()`, which `saved.batches(...)` calls, saves the snapshots and
    checkpoints that are due. Leaving the block without an exception saves the last step. Modules, optimizers and
    schedulers must be equal on all ranks (DDP) or sharded (FSDP2), and are saved once. Each rank saves its own state of
    other objects, such as a loader, and of the random number generators of torch and Python.

    Args:
        checkpoint_seconds: the seconds between checkpoints in the run directory.
        snapshot_seconds: the seconds between snapshots in each node's memory. If a rank dies, the ranks continue from
            the newest snapshot. Snapshots are rarer if they would take more than 1 % of the time. 0 means no snapshots.
        keep: the number of checkpoints to keep.
        objects: the objects to save. Each has `state_dict` and `load_state_dict`, and the same name in every attempt.

    Raises:
        ValueError: an interval is negative or no number, or `keep` is less than 1.
    """
    return SavedState(objects, checkpoint_seconds, snapshot_seconds, keep)
