"""Owns this process's place in its run, as the environment tells it. Runs on every rank; imports no torch."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, kw_only=True)
class ThisRank:
    """The place of a process in its run."""

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    run_dir: Path | None
    """None: the script was not started by a run."""
    heartbeat: Path | None
    checkpoints: Path | None
    """Where this rank writes checkpoints; None: another one does."""
    snapshots: Path | None
    """Where this rank writes snapshots; None: another one of its node does, or there are none."""

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Self:
        """Read torchrun's variables and those of the node agent."""

        def path(name: str) -> Path | None:
            return Path(environment[name]) if name in environment else None

        def number(name: str, usual: int) -> int:
            # Other programs that import this module may find anything in such a variable.
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
    """Print a warning into the log of this rank."""
    print(f"relay: rank {THIS_RANK.rank}: {text}", file=sys.stderr, flush=True)


def check_no_later_attempt() -> None:
    """Raise RuntimeError if a later attempt has begun elsewhere. This can happen if Slurm could not end this node."""
    if THIS_RANK.run_dir is None or not (events := THIS_RANK.run_dir / "events").is_dir():
        return
    attempt = THIS_RANK.attempt
    os.close(os.open(events, os.O_RDONLY))  # NFS caches for up to a minute that a file is missing
    if (events / f"attempt-{attempt + 1:03d}-node-00.jsonl").exists():
        raise RuntimeError(f"attempt {attempt + 1} has begun: attempt {attempt} writes nothing more")
