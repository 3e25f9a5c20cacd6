"""Where a script is in its loops over epochs and batches: saved and restored like its objects. Runs on every rank."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from .object_states import random_states, restore_random
from .this_rank import THIS_RANK

Batch = TypeVar("Batch")


class LoopPosition:
    """Counts epochs and their batches, and leaves out what was done before the state was saved."""

    def __init__(self) -> None:
        self.epoch = 0
        """The epoch that is not finished yet."""
        self._batches, self._to_skip = 0, 0
        self._random_states: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the states of the random number generators when the epoch's batches began."""
        return {
            "epoch": self.epoch, "batches": self._batches, "world_size": THIS_RANK.world_size,
            "random": self._random_states,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the position. With another number of ranks, as much of the epoch's data counts as done."""
        self.epoch = state["epoch"]
        self._batches = self._to_skip = state["batches"] * state["world_size"] // THIS_RANK.world_size
        self._random_states = state["random"]

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are not finished yet, of `count`."""
        while self.epoch < count:
            yield self.epoch
            self.epoch, self._batches, self._to_skip = self.epoch + 1, 0, 0

    def batches(self, loader: Iterable[Batch], *, skips: bool) -> Iterator[Batch]:
        """Yield the batches of an epoch; if `skips`, without those that are done.

        Those are loaded from the random numbers that the epoch began with, so a loader that shuffles gives the same
        order, and its workers the same random transforms. The training then continues with its own random numbers.
        """
        if skips and self._to_skip and self._random_states:
            now = random_states()
            restore_random(self._random_states)
            batches = iter(loader)
            # An epoch may have several loaders, of which the first ones are used up.
            self._to_skip -= sum(1 for _ in islice(batches, self._to_skip))
            restore_random(now)
        else:
            self._random_states, self._to_skip = random_states(), 0
            batches = iter(loader)
        for batch in batches:
            self._batches += 1
            yield batch
