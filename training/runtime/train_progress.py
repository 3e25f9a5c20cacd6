"""Owns a training's progress. Runs on every rank."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(kw_only=True)
class Progress:
    """A training's progress and the results of its validations: plain numbers that are saved with the state."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epochs done
    samples_seen: int = 0  # images of the current epoch that were used
    evaluated_epochs: int = 0  # epochs done at the last validation
    val_loss: float | None = None  # loss of the last validation
    val_accuracy: float | None = None  # accuracy of the last validation
    best_accuracy: float | None = None  # highest accuracy of all validations
    best_epoch: int = 0  # number of the epoch with the highest accuracy
    lr_factor: float = 1.0  # factor by which schedule `plateau` has lowered the learning rate
    plateau_loss: float | None = None  # lowest validation loss seen by schedule `plateau`
    plateau_epochs: int = 0  # epochs since `plateau_loss`, or since the learning rate was lowered
    logged_step: int = 0  # last step with a line of metrics

    def advance(self, batch_size: int, samples_per_epoch: int) -> None:
        """Count a step."""
        self.step += 1
        self.samples_seen += batch_size
        if self.samples_seen == samples_per_epoch:
            self.epoch, self.samples_seen = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Set all fields."""
        for name, value in state_dict.items():
            setattr(self, name, value)
