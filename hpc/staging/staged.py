"""What staging came to. Pure."""

from dataclasses import dataclass
from pathlib import Path

from hpc.core.errors import TorchrelayError


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Where the data are to be read on this node."""

    path: Path
    reused: bool = False
    in_place: str | None = None
    """Why they are read from shared storage after all; None if they were staged."""
    seconds: float = 0.0
    bytes_from_source: int = 0
    bytes_from_peers: int = 0
    fallback: str | None = None
    """Why this node read from shared storage what another one was to send."""
    repaired: int = 0
    """Files that were damaged."""
    evicted: tuple[str, ...] = ()
    """Copies that were deleted to make room."""
    in_memory: bool = False
    """Whether the copy takes memory, not disk."""


class NoRoomError(TorchrelayError):
    """There is no room to unpack an archive, and it cannot be read in place."""

    def __init__(self, why: str, archive: Path) -> None:
        super().__init__(
            f"{why}: unpack {archive} on shared storage and give that directory as --data, or use --stage-dir with a "
            "larger disk"
        )
        self.why = why
