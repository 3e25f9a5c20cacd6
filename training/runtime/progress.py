"""How far a run is. Runs on every rank."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Progress:
    """How far a run is: plain numbers."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs done."""
    samples_seen: int = 0
    """Images of the current epoch that were used."""
    evaluated_epochs: int = 0
    """Epochs after which the model was validated."""
    val_loss: float | None = None
    """Of the last validation."""
    val_accuracy: float | None = None
    best_accuracy: float | None = None
    """The highest in validation."""
    best_epoch: int = 0
    """The epoch after which it was."""
    lr_factor: float = 1.0
    """What schedule `plateau` has made of the learning rate."""
    plateau_loss: float | None = None
    """The lowest validation loss that it knows of."""
    plateau_epochs: int = 0
    """Epochs since then, or since it has last lowered the rate."""
    logged_step: int = 0
    """The last one with a line of metrics."""
    corrupt: list[int] = field(default_factory=list)
    """Places in the training set of the images that could not be read, sorted."""

    def advance(self, batch_size: int, samples_per_epoch: int) -> None:
        """Count a step."""
        self.step += 1
        self.samples_seen += batch_size
        if self.samples_seen == samples_per_epoch:
            self.epoch, self.samples_seen = self.epoch + 1, 0
