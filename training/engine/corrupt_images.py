"""Tells all ranks which images of the training set cannot be read: each rank meets only some. Runs on every rank."""

from collections.abc import Iterable
from typing import Any

import torch

from hpc.run.events.kinds import Problem
from training.data.dataset import check_corrupt_limit
from training.data.loader import ImageSource
from training.monitoring.run_logger import RunLogger
from training.runtime.process_group import ProcessGroup


class CorruptImages:
    """The unreadable images of the training set that any rank has met. Ranks share them when a state is saved."""

    def __init__(self, source: ImageSource, limit: int, group: ProcessGroup, logger: RunLogger) -> None:
        self._source, self._limit, self._group, self._logger = source, limit, group, logger
        self.indices: list[int] = []
        """Sorted indices of the images that all ranks know. The list is changed in place, never replaced."""
        self._unshared: set[int] = set()
        """Indices of images that this rank has met, and of which other ranks may not know."""

    def add(self, indices: Iterable[int]) -> None:
        """Add the indices of unreadable images that this rank has met."""
        self._unshared |= set(indices) - set(self.indices)

    def state_dict(self) -> dict[str, Any]:
        """Share the images that each rank has met, and return all indices. All ranks must call this.

        Raises SharedError if there are too many.
        """
        # Unreadable images are rare, and summing a number is faster than gathering lists.
        some_unshared = bool(self._group.all_reduce(torch.tensor(len(self._unshared))))
        unreadable = set().union(*self._group.all_gather_json(list(self._unshared))) if some_unshared else set()
        self._unshared = set()
        new = sorted(unreadable - set(self.indices))
        self.indices[:] = sorted([*self.indices, *new])
        for name in map(self._source.name, new):
            self._logger.console.warn(f"{name} cannot be read: another image takes its place")
            self._logger.event(Problem(what="image_corrupt", detail=name))
        check_corrupt_limit(self._source, self.indices, self._limit)
        return {"indices": list(self.indices)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the indices."""
        self.indices[:] = state_dict["indices"]
