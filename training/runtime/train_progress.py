"""The progress of a run. Runs on every rank."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(kw_only=True)
class Progress:
    """A run's progress and the results of its validations: plain numbers, saved with the state."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epochs done
    samples_seen: int = 0  # images of the current epoch that were used
    evaluated_epochs: int = 0  # epochs after which the model was validated
    val_loss: float | None = None  # of the last validation, like the accuracy
    val_accuracy: float | None = None
    best_accuracy: float | None = None  # the highest of all validations
    best_epoch: int = 0  # the epoch with that accuracy
    lr_factor: float = 1.0  # by which schedule `plateau` has lowered the learning rate
    plateau_loss: float | None = None  # the lowest validation loss that schedule `plateau` has seen
    plateau_epochs: int = 0  # epochs since that loss, or since the learning rate was lowered
    logged_step: int = 0  # the last step with a line of metrics

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
