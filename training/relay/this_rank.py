"""Reads from the environment which rank of which run this process is. Runs on every rank; imports no torch."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, kw_only=True)
class ThisRank:
    """A process's rank and attempt, and the paths that it writes."""

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    run_dir: Path | None
    """Path of the run directory; None if no run of torchrelay started this process."""
    heartbeat: Path | None
    checkpoints: Path | None
    """Directory in which rank 0 writes checkpoints; None on other ranks."""
    snapshots: Path | None
    """Directory in which local rank 0 writes snapshots; None on other ranks, or without snapshots."""

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Self:
        """Return the rank that the environment variables of torchrun and the node agent describe."""

        def path(name: str) -> Path | None:
            return Path(environment[name]) if name in environment else None

        def number(name: str, usual: int) -> int:
            # Programs other than ranks import this module too, and may have any text in such a variable.
            return int(environment[name]) if environment.get(name, "").isdecimal() else usual

        rank, local_rank = number("RANK", 0), number("LOCAL_RANK", 0)
        run_dir = path("TORCHRELAY_RUN_DIR")
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=number("WORLD_SIZE", 1),
            attempt=number("TORCHRELAY_ATTEMPT", 0),
            run_dir=run_dir,
            heartbeat=path("TORCHRELAY_HEARTBEAT"),
            checkpoints=run_dir / "checkpoints" if run_dir and rank == 0 else None,
            snapshots=path("TORCHRELAY_SNAPSHOTS") if local_rank == 0 else None,
        )


THIS_RANK = ThisRank.find(os.environ)


def warn(text: str) -> None:
    """Print a warning to this rank's stderr."""
    print(f"relay: rank {THIS_RANK.rank}: {text}", file=sys.stderr, flush=True)


def check_no_later_attempt() -> None:
    """Raise RuntimeError if a later attempt has begun, as can happen if Slurm failed to end this node's processes."""
    if THIS_RANK.run_dir is None or not (events := THIS_RANK.run_dir / "events").is_dir():
        return
    attempt = THIS_RANK.attempt
    os.close(os.open(events, os.O_RDONLY))  # without this, NFS may hide the file for up to a minute
    if (events / f"attempt-{attempt + 1:03d}-node-00.jsonl").exists():
        raise RuntimeError(f"attempt {attempt + 1} has begun: attempt {attempt} writes nothing more")
