"""Ends a training early if it no longer improves, or after --max-hours. Runs on every rank."""

import math
import time
from typing import Any

from training.config.train_config import TrainConfig
from training.runtime.process_group import ProcessGroup
from training.runtime.train_progress import Progress

PATIENCE, MAX_HOURS = "early_stopping", "max_hours"
_MESSAGES = {
    PATIENCE: "no higher validation accuracy for {config.early_stopping_patience} epochs (--early-stopping-patience)",
    MAX_HOURS: "the limit of --max-hours {config.max_hours:g} is reached",
}


class EarlyStopping:
    """Decides when a training ends early. It saves the training time of all attempts, by rank 0's clock."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._limit_seconds = config.max_hours * 3600 or math.inf
        self._earlier_seconds = 0.0
        self._began = time.monotonic()

    def start_clock(self) -> None:
        """Start to count time. Call this after connecting, compiling and restoring, which do not count."""
        self._began = time.monotonic()

    @property
    def spent_seconds(self) -> float:
        """Seconds that all attempts took to reach the present state."""
        return self._earlier_seconds + time.monotonic() - self._began

    @property
    def out_of_time(self) -> bool:
        """Whether --max-hours have passed, by this rank's clock."""
        return self.spent_seconds >= self._limit_seconds

    def reason(self, progress: Progress, group: ProcessGroup) -> str | None:
        """Return PATIENCE or MAX_HOURS if the training must end now, or None. All ranks must call this."""
        if out_of_patience(self._config, progress):
            return PATIENCE
        return MAX_HOURS if group.all_gather_json(self.out_of_time)[0] else None

    def message(self, reason: str) -> str:
        """Return the message for a reason that `reason` returned."""
        return _MESSAGES[reason].format(config=self._config)

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds of all attempts so far."""
        return {"spent_seconds": self.spent_seconds}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the seconds of earlier attempts."""
        self._earlier_seconds = state_dict["spent_seconds"]


def out_of_patience(config: TrainConfig, progress: Progress) -> bool:
    """Return whether --early-stopping-patience epochs have passed without a higher validation accuracy."""
    return 0 < config.early_stopping_patience <= progress.evaluated_epochs - progress.best_epoch
