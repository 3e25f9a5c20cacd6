"""When a training ends before its last epoch: when it does not get better, or its time is over. Runs on every rank."""

import math
import time
from collections.abc import Mapping
from typing import Any

from training.config.train_config import TrainConfig
from training.runtime.process_group import ProcessGroup
from training.runtime.progress import Progress

PATIENCE, MAX_HOURS = "early_stopping", "max_hours"
_SAYS = {
    PATIENCE: "no higher validation accuracy in --early-stopping-patience {config.early_stopping_patience} epochs",
    MAX_HOURS: "--max-hours {config.max_hours:g} are over",
}


class EarlyStopping:
    """The hours that all attempts together may take. Each begins where the state that it resumes was saved.

    Clocks differ: rank 0's counts.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._limit = config.max_hours * 3600 or math.inf
        self._earlier_seconds = 0.0
        self._began = time.monotonic()

    def begin(self, numbers: Mapping[str, Any] | None) -> None:
        """Count from now on, after what a saved state had counted."""
        self._earlier_seconds = numbers["accounting"]["spent_seconds"] if numbers else 0.0
        self._began = time.monotonic()

    @property
    def spent_seconds(self) -> float:
        """Of all attempts, in what led to the present state."""
        return self._earlier_seconds + time.monotonic() - self._began

    @property
    def used_up(self) -> bool:
        """Whether there is no time left, by this rank's clock."""
        return self.spent_seconds >= self._limit

    def why_over(self, progress: Progress, group: ProcessGroup) -> str | None:
        """Why no step is to follow; None: one is. All ranks must call this."""
        if out_of_patience(self._config, progress):
            return PATIENCE
        return MAX_HOURS if group.all_gather_object(self.used_up)[0] else None

    def told(self, reason: str) -> str:
        """The same for people."""
        return _SAYS[reason].format(config=self._config)


def out_of_patience(config: TrainConfig, progress: Progress) -> bool:
    """Whether there were too many epochs without a higher validation accuracy."""
    return 0 < config.early_stopping_patience <= progress.evaluated_epochs - progress.best_epoch
