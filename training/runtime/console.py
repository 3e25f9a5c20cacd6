"""Prints lines, or on a terminal a progress bar, to standard output. Runs on every rank; rank 0 prints."""

import sys
from contextlib import suppress

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpc.base.text import visible


class Console:
    """Prints lines and a progress bar if it is enabled; the trainer enables it on rank 0."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._bar: Progress | None = None

    def start(self, done_steps: int, total_steps: int) -> None:
        """Show a progress bar of steps, if standard output is a terminal."""
        if self._enabled and sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=RichConsole())
            self._bar.add_task("", completed=done_steps, total=total_steps)
            self._bar.start()

    def step(self, done_steps: int) -> None:
        """Advance the progress bar."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=done_steps)

    def metrics(self, heading: str, values: str) -> None:
        """Show the metrics beside the bar, or as a line."""
        # Read the bar only once: another thread may stop it meanwhile.
        if bar := self._bar:
            bar.update(bar.task_ids[0], description=values)
        else:
            self.print(f"{heading} {values}")

    def print(self, text: str) -> None:
        """Print a line."""
        if not self._enabled:
            return
        # The log's disk may be full, and this error must not end the training.
        with suppress(OSError):
            if self._bar:
                self._bar.console.print(visible(text), markup=False, highlight=False, soft_wrap=True)
            else:
                print(visible(text), flush=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.print(f"warning: {text}")

    def stop(self) -> None:
        """Remove the progress bar."""
        if self._bar:
            self._bar.stop()
            self._bar = None
