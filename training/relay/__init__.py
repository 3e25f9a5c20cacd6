"""Three calls for a torchrun script of your own: `should_stop`, `report`, `state`. Runs on every rank.

For example::

    from training.relay import report, should_stop, state

    with state(model=model, optimizer=optimizer) as saved:  # restores them, and saves them while they change
        while saved.step < 10_000:
            loss = train(next(batches))
            saved.step += 1
            report(step=saved.step, loss=loss)
            if should_stop():  # on a signal: the same answer on all ranks, at the same step
                break

This package imports nothing else of torchrelay: a project that runs where torchrelay is not installed has a copy of the
package, under the name `relay`. If no run of torchrelay has started the script, `should_stop` returns False, and the
others do nothing. More is in docs/tutorials/own-script.md.

Our own trainer uses the same stop signals, heartbeat, exchanges between ranks, files of checkpoints, and choice of the
newest one. This module does not import `torch`: that takes seconds, in which a signal would not be noticed.
"""

import time
from typing import Any

from .object_states import Saveable
from .progress_files import progress_files
from .rank_exchange import ranks
from .saved_state import SavedState
from .stop_consensus import StepFlags, StopRequested
from .stop_signals import signals
from .this_rank import THIS_RANK

__all__ = ["report", "should_stop", "state"]


def should_stop() -> bool:
    """Return whether to save and exit with 0: True on all ranks at the same call, one step after a rank got a signal.

    All ranks call it equally often, after each step. In `with state(...)`, it also takes the snapshots that are due.

    Raises:
        RuntimeError: there are several ranks, and torch.distributed is not initialized yet.
    """
    if THIS_RANK.run_dir is None or ranks.stopping:
        return ranks.stopping is not None
    consensus, saved = ranks.connect("should_stop()"), SavedState.active
    progress_files.beat(saved.step if saved else None)
    checkpoint, snapshot = saved.due() if saved else (0, 0)
    try:
        agreed = consensus.exchange(StepFlags(signal=signals.received(), save=checkpoint, snapshot=snapshot))
    except StopRequested as request:
        ranks.stopping = request.name, signals.received_at() or time.monotonic()
        return True
    if saved and (agreed.save or agreed.snapshot):
        saved.save(durable=bool(agreed.save))
    return False


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

    Entering restores the newest state that any rank can reach; `saved.step` says how many steps are done, and the loop
    counts it up. `should_stop()` takes the snapshots and checkpoints that are due; leaving without an exception saves
    the last step. Modules, optimizers and schedulers are the same on all ranks (DDP), or in shards (FSDP2). Each
    rank saves its own state of all else, such as a loader, and of the random number generators of torch and Python.

    Args:
        checkpoint_seconds: the seconds between checkpoints in the run directory.
        snapshot_seconds: the seconds between snapshots in the memory of each node, from which the ranks go on if one of
            them dies. They are fewer if they would take more than 1 % of the time. 0: no snapshots.
        keep: how many checkpoints to keep.
        objects: each has `state_dict` and `load_state_dict`, and the same name in every attempt.
    """
    return SavedState(objects, checkpoint_seconds, snapshot_seconds, keep)
