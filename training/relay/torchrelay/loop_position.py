"""Owns a script's position in its loops over epochs and batches, and restores it. Runs on every rank."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from .saving.values import random_states, restore_random
from .this_rank import THIS_RANK

Batch = TypeVar("Batch")


class LoopPosition:
    """Counts epochs and their batches, and skips the batches that were used before the state was saved."""

    def __init__(self) -> None:
        self.epoch = 0
        """The epoch that is not finished yet."""
        self._batches, self._to_skip = 0, 0
        # States of the random number generators: at the start of the epoch, at the start of its batches, and after the
        # restore. The training continues with the last one.
        self._at_epoch = dict[str, Any]()
        self._at_batches = dict[str, Any]()
        self._now = dict[str, Any]()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the random number generators' states at the start of the epoch and its batches."""
        return {
            "epoch": self.epoch, "batches": self._batches, "world_size": THIS_RANK.world_size,
            "at_epoch": self._at_epoch, "at_batches": self._at_batches,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the position. With another number of ranks, the same share of the epoch's data counts as used."""
        self.epoch = state["epoch"]
        self._batches = self._to_skip = state["batches"] * state["world_size"] // THIS_RANK.world_size
        self._at_epoch, self._at_batches = state["at_epoch"], state["at_batches"]

    def begin_epoch(self) -> None:
        """Begin an epoch. An interrupted epoch begins again with the random states with which it first began."""
        if self._to_skip and self._at_epoch:
            self._now = random_states()
            restore_random(self._at_epoch)
        else:
            self._at_epoch = random_states()

    def end_epoch(self) -> None:
        """Go on to the next epoch."""
        self.epoch, self._batches, self._to_skip = self.epoch + 1, 0, 0

    def batches(self, loader: Iterable[Batch], *, skips: bool, skipped: Callable[[], object]) -> Iterator[Batch]:
        """Yield the batches of an epoch. If `skips`, load and skip the used batches, and call `skipped` for each.

        After a restore, loading starts with the random states of the earlier attempt. So a loader repeats its order,
        and its workers repeat their random transforms. The training then continues with its own random states.
        """
        here = random_states()
        now = (self._now or here) if self._to_skip else None
        self._now = {}
        if not skips:
            self._to_skip = 0
        if self._to_skip:
            restore_random(self._at_batches)
        else:
            self._at_batches = here
        batches = iter(loader)
        # If an epoch has several loaders, the first ones may have no batches left.
        for _ in islice(batches, self._to_skip):
            self._to_skip -= 1
            skipped()
        if now:
            restore_random(now)
        for batch in batches:
            self._batches += 1
            yield batch
