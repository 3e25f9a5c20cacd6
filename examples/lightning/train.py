"""PyTorch Lightning: a callback reports each step and saves Lightning's own checkpoint. Runs once per rank.

hpc submit --nodes 2 --gpus-per-node 4 --python ENV/bin/python -- examples/lightning/train.py {run_dir} --nodes 2

A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last checkpoint, at most
--save-steps. Under torchrun, Lightning takes its ranks from torchrun instead of Slurm, and does not requeue the job.
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
from torchrelay import report, should_stop

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
    """Reports each step; saves every `save_steps` steps, and when the run is asked to stop."""

    def __init__(self, checkpoint: Path, save_steps: int) -> None:
        self.checkpoint, self.save_steps = checkpoint, save_steps

    def on_train_start(self, *_: Any) -> None:
        """Replace Lightning's handler, which ends the training at SIGTERM before anything is saved."""
        signal.signal(signal.SIGTERM, RECORDS_SIGNAL)

    def on_train_batch_end(self, trainer: Trainer, _: LightningModule, outputs: Any, *__: Any) -> None:
        """Runs after each step."""
        report(step=trainer.global_step, epoch=trainer.current_epoch, loss=outputs["loss"])
        stop = should_stop()
        if stop or trainer.global_step % self.save_steps == 0:
            self.save(trainer)
        if stop:
            sys.exit(0)

    def save(self, trainer: Trainer) -> None:
        """Replace the checkpoint in one go: a crash in the middle of a save leaves the previous one."""
        temporary = self.checkpoint.with_suffix(".tmp")
        trainer.save_checkpoint(temporary)  # all ranks call it, rank 0 writes
        if trainer.is_global_zero:
            temporary.replace(self.checkpoint)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--save-steps", type=int, default=100)
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
        strategy="ddp", max_epochs=args.epochs, callbacks=[Relay(checkpoint, args.save_steps)],
        default_root_dir=args.run_dir, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Regression(), loader, ckpt_path=checkpoint if checkpoint.exists() else None, weights_only=False)


if __name__ == "__main__":
    main()
