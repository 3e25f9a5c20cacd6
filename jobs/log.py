"""What an agent says to people: a line in the job's log. Runs on compute nodes."""

import contextlib


def log(text: str) -> None:
    """Print a line, if the disk of the log takes it: what the agent does is worth more than what it says."""
    with contextlib.suppress(OSError):
        print(f"torchrelay: {text}", flush=True)
