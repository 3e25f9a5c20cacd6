"""The directory of a sweep: its runs, which are Optuna's trials, and Optuna's journal."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc.run.rundir import RunDir
from hpc.studies.group_dir import GroupDir, GroupSpec

Sampler = Literal["tpe", "random", "grid"]
Direction = Literal["maximize", "minimize"]
Pruner = Literal["median", "none"]


@dataclass(frozen=True, kw_only=True)
class SweepSpec(GroupSpec):
    """The settings of a sweep."""

    param: tuple[str, ...]
    trials: int
    metric: str
    """Name of the metric, as trackers show it, such as `val/accuracy`."""
    direction: Direction
    sampler: Sampler
    pruner: Pruner
    seed: int


class SweepDir(GroupDir[SweepSpec]):
    """The files of a sweep, by name."""

    KIND = TITLE = "sweep"
    SPEC = SweepSpec

    @property
    def journal(self) -> Path:
        """The file of Optuna's journal, which has all trials."""
        return self.path / "journal.log"

    @property
    def best(self) -> Path:
        """The file with the flags of the best trial, for --config."""
        return self.path / "best.yaml"

    def trial(self, number: int) -> RunDir:
        """Return the run of a trial, by its number from 0."""
        return self.run(f"{number:03d}")
