"""What a packer says while it works: a bar on a terminal, else a line every few seconds."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_LINE_SECONDS = 5.0


class PackProgress:
    """How far it is, how fast, and how long it will take."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._first = total, done, done
        self._began = self._told = time.monotonic()
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        if self._done:
            self._say(f"{self._done} of {self._total} images were packed before")
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(soft_wrap=True, highlight=False))
            self._bar.add_task("", completed=self._done, total=self._total)
            self._bar.start()
        return self

    def __exit__(self, _type: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, images: int, corrupt: Sequence[Path]) -> None:
        """So many more are packed, some of which were corrupt."""
        for path in corrupt:
            self._say(f"warning: {path} cannot be decoded: it is marked")
        self._done += images
        now = time.monotonic()
        rate = (self._done - self._first) / max(now - self._began, 1e-9)
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self._done, description=f"{rate:.0f} images/s")
        elif now - self._told >= _LINE_SECONDS:
            self._told = now
            left = round((self._total - self._done) / rate)
            self._say(f"{self._done} of {self._total} images, {rate:.0f} images/s, eta {left // 60}:{left % 60:02d}")

    def _say(self, text: str) -> None:
        if self._bar:
            self._bar.console.print(text, markup=False)
        else:
            print(text, flush=True)
