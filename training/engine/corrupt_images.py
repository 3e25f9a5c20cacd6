"""Images that cannot be read: every rank meets some, all ranks must know of all. Runs on every rank."""

from collections.abc import Iterable

import torch

from training.data.dataset import check_corrupt_limit
from training.data.loader import ImageSource
from training.monitoring.run_logger import RunLogger
from training.runtime.process_group import ProcessGroup
from training.runtime.progress import Progress


class CorruptImages:
    """The unreadable images of the training set that any rank has met."""

    def __init__(
        self, source: ImageSource, limit: int, progress: Progress, group: ProcessGroup, logger: RunLogger
    ) -> None:
        self._source, self._limit, self._group, self._logger = source, limit, group, logger
        # What all ranks know is in there, and saved with it.
        self._progress = progress
        self._news: set[int] = set()

    def add(self, indices: Iterable[int]) -> None:
        """This rank has met these."""
        self._news |= set(indices) - set(self._progress.corrupt)

    @property
    def has_news(self) -> bool:
        """Whether this rank knows of some that others may not know of."""
        return bool(self._news)

    def share(self) -> None:
        """Tell all ranks. All of them must call this.

        Raises:
            SharedError: there are more than are allowed.
        """
        # Hardly ever is there anything: a number costs less time than a set.
        any_news = bool(self._group.all_reduce(torch.tensor(len(self._news))))
        everybodys = set().union(*self._group.all_gather_object(self._news)) if any_news else set()
        self._news = set()
        new = sorted(everybodys - set(self._progress.corrupt))
        self._progress.corrupt = sorted([*self._progress.corrupt, *new])
        for name in map(self._source.name, new):
            self._logger.console.warn(f"{name} cannot be read: another image takes its place")
            self._logger.event("image_corrupt", path=name)
        check_corrupt_limit(self._source, self._progress.corrupt, self._limit)
