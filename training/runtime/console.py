"""What people see: lines, or a progress bar on a terminal. Rank 0 speaks, the other ranks are silent."""

import sys
from contextlib import suppress

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Console:
    """Prints for rank 0, and nothing for the others."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._bar: Progress | None = None

    def start(self, done: int, total: int) -> None:
        """Show a progress bar of steps, if this is a terminal."""
        if self._speaks and sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=RichConsole())
            self._bar.add_task("", completed=done, total=total)
            self._bar.start()

    def step(self, done: int) -> None:
        """A step is done."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def metrics(self, head: str, values: str) -> None:
        """Show the metrics: beside the bar, or as a line."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], description=values)
        else:
            self.say(f"{head} {values}")

    def say(self, text: str) -> None:
        """Print a line."""
        if not self._speaks:
            return
        # The log may lie on the disk that has just become full, and there is nowhere else to say so.
        with suppress(OSError):
            if self._bar:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, flush=True)

    def warn(self, text: str) -> None:
        """Print a line that something is wrong."""
        self.say(f"warning: {text}")

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar:
            self._bar.stop()
            self._bar = None
