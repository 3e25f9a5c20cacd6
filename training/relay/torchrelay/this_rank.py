"""Reads from the environment which rank of which run this process is. Runs on every rank; imports no torch."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PROTOCOL = "1"
"""Number of the contract between this package and the node agents: the variables that they set, the heartbeat, and the
files in the run directory and in the node's memory. They set it in TORCHRELAY_PROTOCOL. Copies of `relay` from release
0.2 do not know the number, and follow contract 1."""


@dataclass(frozen=True, kw_only=True)
class ThisRank:
    """A process's rank and attempt, and the paths that it writes."""

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    protocol: str | None
    """The agents' PROTOCOL; None if no agent, or one of an earlier version, started this process."""
    run_dir: Path | None
    """Path of the run directory; None if no run of torchrelay started this process."""
    next_claim: Path | None
    """Path of the file that exists once the next attempt has begun; None if no agent started this process."""
    heartbeat: Path | None
    checkpoints: Path | None
    """Directory of the run's checkpoints; None if no run of torchrelay started this process."""
    snapshots: Path | None
    """Directory of the snapshots in this node's memory; None without snapshots."""

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Self:
        """Return the rank that the environment variables of torchrun and the node agent describe."""

        def path(name: str) -> Path | None:
            return Path(environment[name]) if name in environment else None

        def number(name: str, usual: int) -> int:
            # Programs other than ranks import this module too, and may have any text in such a variable.
            return int(environment[name]) if environment.get(name, "").isdecimal() else usual

        run_dir = path("TORCHRELAY_RUN_DIR")
        return cls(
            rank=number("RANK", 0),
            local_rank=number("LOCAL_RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            attempt=number("TORCHRELAY_ATTEMPT", 0),
            protocol=environment.get("TORCHRELAY_PROTOCOL"),
            run_dir=run_dir,
            next_claim=path("TORCHRELAY_NEXT_CLAIM"),
            heartbeat=path("TORCHRELAY_HEARTBEAT"),
            checkpoints=run_dir / "checkpoints" if run_dir else None,
            snapshots=path("TORCHRELAY_SNAPSHOTS"),
        )


THIS_RANK = ThisRank.find(os.environ)


def warn(text: str) -> None:
    """Print a warning to this rank's stderr: a script's stdout may be read by a program."""
    print(f"torchrelay: rank {THIS_RANK.rank}: {text}", file=sys.stderr, flush=True)


class OtherVersionError(RuntimeError):
    """The agent that started this rank has another contract with this package."""


def check_version() -> None:
    """Check that the agent that started this rank, if any, has the same contract.

    Raises OtherVersionError if it has another one, because the script has a copy of this package from another version.
    """
    protocol = THIS_RANK.protocol
    if protocol != PROTOCOL and (protocol or THIS_RANK.attempt):
        raise OtherVersionError(
            f"{Path(__file__).parent} is of another version of torchrelay than the one that submitted this run "
            f"(protocol {PROTOCOL}, not {protocol}): remove it from your project, and use `from torchrelay import ...` "
            "instead; or update torchrelay, and submit the run again"
        )


def check_no_later_attempt() -> None:
    """Check that no later attempt has begun, as can happen if Slurm failed to end this node's processes.

    Raises RuntimeError if a later attempt has begun, or OSError if the run directory cannot be read.
    """
    attempt, claim = THIS_RANK.attempt, THIS_RANK.next_claim
    if claim is None:
        return  # no agent: the user has set TORCHRELAY_RUN_DIR to try the script
    os.close(os.open(claim.parent, os.O_RDONLY))  # without this, NFS may hide the file for up to a minute
    with suppress(FileNotFoundError):
        claim.stat()  # not exists(), which takes any error of the storage for a missing file from Python 3.14 on
        raise RuntimeError(f"attempt {attempt + 1} has begun: attempt {attempt} writes nothing more")
