"""Prints lines to standard output. Runs on every rank; rank 0 prints."""

from contextlib import suppress

from hpc.base.text import visible


class Console:
    """Prints lines if it is enabled; the trainer enables it on rank 0."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def print(self, text: str) -> None:
        """Print a line."""
        # The log's disk may be full, and this error must not end the training.
        with suppress(OSError):
            if self._enabled:
                print(visible(text), flush=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.print(f"warning: {text}")
