"""How far a packer is: a progress bar on a terminal, else a line every few seconds."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_SECONDS = 5.0


class PackProgress:
    """Prints the number of packed images, the rate and the remaining time."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._first = total, done, done
        self._began = self._printed = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(
            *columns, console=Console(soft_wrap=True, highlight=False), disable=not sys.stdout.isatty()
        )
        self._task = self._bar.add_task("", completed=done, total=total)

    def __enter__(self) -> Self:
        if self._done:
            self._print(f"{self._done} of {self._total} images were packed before")
        self._bar.start()
        return self

    def __exit__(self, _type: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, images: int, corrupt: Sequence[Path]) -> None:
        """Count packed images, and warn of corrupt ones."""
        for path in corrupt:
            self._print(f"warning: {path} cannot be decoded: it is marked")
        self._done += images
        now = time.monotonic()
        rate = (self._done - self._first) / max(now - self._began, 1e-9)
        self._bar.update(self._task, completed=self._done, description=f"{rate:.0f} images/s")
        if self._bar.disable and rate and now - self._printed >= _LINE_SECONDS:
            self._printed = now
            left = round((self._total - self._done) / rate)
            self._print(f"{self._done} of {self._total} images, {rate:.0f} images/s, eta {left // 60}:{left % 60:02d}")

    def _print(self, text: str) -> None:
        if self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False)
