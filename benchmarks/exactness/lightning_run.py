"""A minimal PyTorch Lightning script that is cut and resumed by Lightning's own means. Runs once per rank.

Variants: `plain` is torch's DataLoader. `stateful` is torchdata's StatefulDataLoader, whose state Lightning saves.
`by-hand` adds what a user can write: a dataset that remembers its generator, and a callback that saves the global one.
"""

import os
from typing import Any

import common
import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader


class Classifier(LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self, *, dropout: bool, steps: int) -> None:
        super().__init__()
        self.model = common.build_model(dropout=dropout)
        self.steps = steps
        self.trace = common.Trace()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        self.trace.note(self.global_step, images, labels)
        return functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> Any:
        """SGD, and a schedule that Lightning steps after each batch."""
        # Not from trainer.estimated_stepping_batches: reading it loses the loader's state (Lightning's issue 20550).
        optimizer, schedule = common.build_optimizer(self.model, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Cut(Callback):
    """Ends the run before the step that follows the checkpoint: Lightning saves after all other callbacks."""

    def __init__(self, until: int | None) -> None:
        self.until = until

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Runs when the batch is there, before the step."""
        if trainer.global_step == self.until:
            common.die()


class Generator(Callback):
    """Saves the global generator with the checkpoint."""

    restored: Tensor | None = None

    def state_dict(self) -> dict[str, Tensor]:
        """Lightning puts this into the checkpoint."""
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Too early to restore: making the loader's iterator draws from the generator."""
        self.restored = state_dict["torch"]

    def on_train_start(self, *_: Any) -> None:
        """Restore it now that the iterator is made."""
        if self.restored is not None:
            torch.set_rng_state(self.restored)


def main(args: common.Arguments) -> None:
    """Train to the end or to the cut."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    seed_everything(common.SEED, workers=True)
    dataset = (common.RememberingImages if args.variant == "by-hand" else common.Images)(
        args.data, augment=args.randomness
    )
    loader_class = DataLoader if args.variant == "plain" else StatefulDataLoader
    loader = loader_class(dataset, batch_size=common.GLOBAL_BATCH // ranks, shuffle=True, num_workers=args.workers)
    module = Classifier(dropout=args.randomness, steps=common.EPOCHS * len(dataset) // common.GLOBAL_BATCH)
    saver = ModelCheckpoint(args.checkpoints, "{step}", every_n_train_steps=common.CHECKPOINT_EVERY, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=common.EPOCHS,
        deterministic=True,
        callbacks=[Cut(args.until), saver, *([Generator()] if args.variant == "by-hand" else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path=args.checkpoints / f"step={args.resume}.ckpt" if args.resume else None)
    if trainer.is_global_zero:
        common.write_result(args, module.model, trainer.optimizers[0], module.trace)


if __name__ == "__main__":
    main(common.arguments())
