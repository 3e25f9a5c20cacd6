"""PyTorch Lightning, with its own checkpoints and a callback that reports and stops. Runs once per rank.

hpc submit --nodes 2 --gpus-per-node 4 -- examples/lightning/train.py {run_dir} --nodes 2

Under torchrun, Lightning takes its ranks from torchrun and not from Slurm, so that it does not requeue the job itself.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from training.relay import report, should_stop

RECORDS_SIGNAL = signal.getsignal(signal.SIGTERM)


class Regression(LightningModule):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Momentum is a state that must not be lost."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Relay(Callback):
    """Reports each step; saves and ends when the run is asked to stop."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def on_train_start(self, *_: Any) -> None:
        """Lightning's own handler, installed by now, ends the training at SIGTERM before anything is saved."""
        signal.signal(signal.SIGTERM, RECORDS_SIGNAL)

    def on_train_batch_end(self, trainer: Trainer, _: LightningModule, outputs: Any, *__: Any) -> None:
        """Runs after each step."""
        report(step=trainer.global_step, epoch=trainer.current_epoch, loss=outputs["loss"])
        if should_stop():
            trainer.save_checkpoint(self.checkpoint)
            sys.exit(0)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    seed_everything(1)
    inputs = torch.randn(1600, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Its position is part of Lightning's checkpoint.
    loader = StatefulDataLoader(data, batch_size=16, sampler=DistributedSampler(data, ranks, rank))
    checkpoint = args.run_dir / "lightning.ckpt"
    use_gpu = torch.cuda.is_available()
    trainer = Trainer(
        num_nodes=args.nodes, devices=int(os.environ["LOCAL_WORLD_SIZE"]), accelerator="gpu" if use_gpu else "cpu",
        strategy="ddp", max_epochs=args.epochs, callbacks=[Relay(checkpoint)], default_root_dir=args.run_dir,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Regression(), loader, ckpt_path=checkpoint if checkpoint.exists() else None, weights_only=False)


if __name__ == "__main__":
    main()
