"""Where a rank stands among the ranks, as torchrun tells it. Runs on every rank; imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where a rank stands. Without torchrun it is alone."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    restarts: int
    """How often this torchrun has started its ranks anew."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which writes everything and speaks for all."""
        return self.rank == 0


_VARIABLES = {
    "rank": ("RANK", "0"),
    "local_rank": ("LOCAL_RANK", "0"),
    "world_size": ("WORLD_SIZE", "1"),
    "local_world_size": ("LOCAL_WORLD_SIZE", "1"),
    "restarts": ("TORCHELASTIC_RESTART_COUNT", "0"),
}


def rank_info_from(environment: Mapping[str, str]) -> RankInfo:
    """Read torchrun's variables."""
    return RankInfo(**{field: int(environment.get(name, default)) for field, (name, default) in _VARIABLES.items()})
