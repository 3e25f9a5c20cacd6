"""Ends a training before its last epoch if it does not improve, or if --max-hours have passed. Runs on every rank."""

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
    """Counts the hours of all attempts, by rank 0's clock. A part of the training's state."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._limit_seconds = config.max_hours * 3600 or math.inf
        self._earlier_seconds = 0.0
        self._began = time.monotonic()

    def start_clock(self) -> None:
        """Start counting now: connecting, compiling and restoring do not count."""
        self._began = time.monotonic()

    @property
    def spent_seconds(self) -> float:
        """Seconds of all attempts that led to the present state."""
        return self._earlier_seconds + time.monotonic() - self._began

    @property
    def out_of_time(self) -> bool:
        """True if the hours are over, by this rank's clock."""
        return self.spent_seconds >= self._limit_seconds

    def reason(self, progress: Progress, group: ProcessGroup) -> str | None:
        """Return why the training must end now; None if it goes on. All ranks must call this."""
        if out_of_patience(self._config, progress):
            return PATIENCE
        return MAX_HOURS if group.all_gather_json(self.out_of_time)[0] else None

    def message(self, reason: str) -> str:
        """Return the reason in words."""
        return _MESSAGES[reason].format(config=self._config)

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds so far."""
        return {"spent_seconds": self.spent_seconds}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over the seconds of earlier attempts."""
        self._earlier_seconds = state_dict["spent_seconds"]


def out_of_patience(config: TrainConfig, progress: Progress) -> bool:
    """Return whether too many epochs had no higher validation accuracy."""
    return 0 < config.early_stopping_patience <= progress.evaluated_epochs - progress.best_epoch
