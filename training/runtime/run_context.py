"""Describes this process's rank, attempt and run. Runs on every rank; imports no torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torchrelay.progress_files import Heartbeat, Phase

from hpc.base.environment import RESTARTS
from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir
from training.config.evaluation_task import EvaluationTask
from training.config.train_config import TrainConfig
from training.runtime.fault_injection import NO_FAULT, Fault

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The place of this rank among all ranks. A process without torchrun is the only rank."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    restarts: int
    """Number of times that the ranks were restarted in this round."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which writes the files and prints."""
        return self.rank == 0


def rank_info_from(environment: Mapping[str, str]) -> RankInfo:
    """Return the rank that torchrun's environment variables describe."""
    return RankInfo(
        rank=int(environment.get("RANK", "0")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        restarts=int(environment.get(RESTARTS) or environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """An attempt at a run: its training, and the places of its files."""

    config: TrainConfig
    run_dir: RunDir
    attempt: int
    started: float
    """time.monotonic() at the start of the process."""
    node_dir: NodeDir | None = None
    """Directory on this node that outlives the processes; None if there are no snapshots."""
    fault: Fault = NO_FAULT
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None, 0))
    recipe: str | None = None
    evaluation: EvaluationTask | None = None
    """The evaluation to make, or None for a training."""

    def beat_with_each(self, phase: Phase, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items, with a heartbeat before each."""
        for item in items:
            self.heartbeat.beat(phase)
            yield item
