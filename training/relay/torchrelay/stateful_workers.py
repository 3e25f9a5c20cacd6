"""Saves the random states of a StatefulDataLoader's workers, so that random transforms continue. Runs on every rank."""

import sys
from collections.abc import Callable
from typing import Any

from .saving.values import random_states, restore_random
from .this_rank import warn


def save_workers_random_states(name: str, loader: Any) -> None:
    """Have the workers of a StatefulDataLoader save their random states, and do nothing with other objects.

    torchdata restores the position, but its workers begin their random numbers again, so that random transforms would
    differ. A plain DataLoader does not need this: its batches are loaded again from the start of the epoch.
    """
    from torch.utils.data import IterableDataset

    if not hasattr(loader, "snapshot_every_n_steps") or not loader.num_workers:
        return
    # A data set that restores its position may draw its order in `__iter__`, which needs the first random states.
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__dict__"):
        warn(
            f"state({name}=...): after an interruption, the random transforms in the loader's workers may differ. If "
            f"there are any, leave {name} out of state(), or set num_workers=0"
        )
    elif not isinstance(loader.worker_init_fn, _WorkerStart):
        loader.worker_init_fn = _WorkerStart(loader.worker_init_fn)


class _WorkerStart:
    """A `worker_init_fn` that adds the worker's random states to the data set's state, which torchdata saves."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        from torch.utils.data import get_worker_info

        if self._init is not None:
            self._init(worker)
        data: Any = get_worker_info().dataset  # type: ignore[union-attr]  # this is a worker
        save, load = getattr(data, "state_dict", None), getattr(data, "load_state_dict", None)

        def state_dict() -> dict[str, Any]:
            return {"data": save() if save and load else None, "random": random_states(), "numpy": _numpy_state()}

        def load_state_dict(state: dict[str, Any]) -> None:
            if load and state["data"] is not None:
                load(state["data"])
            restore_random(state["random"])
            if state["numpy"]:
                sys.modules["numpy"].random.set_state(state["numpy"])

        data.state_dict, data.load_state_dict = state_dict, load_state_dict


def _numpy_state() -> tuple[Any, ...]:
    """Return the state of numpy's generator, which the worker has seeded, or nothing if numpy is not imported."""
    if "numpy" not in sys.modules:
        return ()
    name, keys, *rest = sys.modules["numpy"].random.get_state()
    return name, tuple(keys.tolist()), *rest
