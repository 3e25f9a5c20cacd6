"""Whether a process of this machine is still there: what squeue is to Slurm. Runs everywhere."""

from pathlib import Path


def is_alive(pid: str | int) -> bool:
    """Whether a process runs. A zombie, which only waits to be looked at by its parent, does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The name, in parentheses, may hold anything; the state is the first word after it.
    return status.rpartition(")")[2].split()[0] != "Z"
