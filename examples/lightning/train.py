"""PyTorch Lightning: torchrelay's callback reports each step and saves Lightning's checkpoint. Runs once per rank.

hpc submit --nodes 2 --gpus-per-node 4 --python ENV/bin/python -- examples/lightning/train.py --nodes 2

A preemption or the time limit costs no step. A crash or a lost node costs the steps since the last checkpoint: half a
minute of work, or more if a save takes longer than 0.3 s. Under torchrun, Lightning takes its ranks from torchrun
instead of Slurm, and does not requeue the job.
"""

import argparse
import os

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrelay.lightning import RelayCallback


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


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    seed_everything(1)
    inputs = torch.randn(1600, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Its position is part of Lightning's checkpoint.
    loader = StatefulDataLoader(data, batch_size=16, sampler=DistributedSampler(data, ranks, rank))
    relay = RelayCallback()
    use_gpu = torch.cuda.is_available()
    trainer = Trainer(
        num_nodes=args.nodes, devices=int(os.environ["LOCAL_WORLD_SIZE"]), accelerator="gpu" if use_gpu else "cpu",
        strategy="ddp", max_epochs=args.epochs, callbacks=[relay],
        log_every_n_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Regression(), loader, ckpt_path=relay.checkpoint, weights_only=False)


if __name__ == "__main__":
    main()
