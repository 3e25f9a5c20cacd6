"""Owns what a script's states do besides being saved: the fence between attempts, events, warnings. On every rank."""

from __future__ import annotations  # torch is imported only when a function is called

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..progress_files import progress_files
from ..this_rank import check_no_later_attempt, warn

if TYPE_CHECKING:
    from torch import Tensor


class Owner:
    """The training whose states are saved: a script, unless a subclass overrides methods.

    The background thread calls `check`, `accepts` and `publishing`, and may call `event` and `warn`.
    """

    def __init__(self) -> None:
        self._warned = set[str]()

    def check(self) -> None:
        """Raise an error if this attempt may not write any more."""
        check_no_later_attempt()

    def accepts(self, _tensors: Mapping[str, Tensor], /) -> bool:
        """Return whether a captured state is to be written. A rank that writes no file has no tensors."""
        return True

    def publishing(self, step: int) -> None:
        """Called before a checkpoint, whose files are written, is published."""

    def event(self, name: str, **fields: Any) -> None:
        """Append an event to the run's ledger, on rank 0."""
        progress_files.event(name, **fields)

    def warn(self, text: str) -> None:
        """Print a warning of this rank."""
        warn(text)

    def warn_once(self, kind: str, reason: str, cost: str) -> bool:
        """Print a warning unless one of its kind has been printed. Returns whether it is printed."""
        if is_new := kind not in self._warned:
            self._warned.add(kind)
            self.warn(f"{kind} ({reason}): {cost} costs the steps since the last checkpoint")
        return is_new

    def problem(self, _values: Mapping[str, Any], _name: str, /, *, durable: bool) -> str:  # noqa: ARG002
        """Return why a saved state is not usable, or an empty text. All ranks call this with the state's values."""
        return ""

    def beat(self) -> None:
        """Called before each tensor is read."""
