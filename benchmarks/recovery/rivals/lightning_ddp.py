"""The same training with Lightning: its Slurm environment, which requeues the job, and a checkpoint per epoch.

As "Run on an on-prem cluster (advanced)" of its documentation has it: srun starts each rank, and
`#SBATCH --signal=SIGUSR1@90` asks for the requeue before the time limit. On the signal it saves `hpc_ckpt_N.ckpt`. By
itself Lightning continues from that alone; a user who also saves epochs passes the newest of both.
"""

import argparse
import signal
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from common import arguments, images_of, network, optimizer_of
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from step_log import StepLog
from torch import nn
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    """The network and its loss."""

    def __init__(self, wait: float) -> None:
        super().__init__()
        self.model, self.wait, self.loss_of = network(), wait, nn.CrossEntropyLoss()

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """The loss of a batch."""
        images, labels = batch
        time.sleep(self.wait)
        loss: torch.Tensor = self.loss_of(self.model(images), labels)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The same for all contenders."""
        return optimizer_of(self)


class Steps(Callback):
    """Logs the steps."""

    def __init__(self, output: Path) -> None:
        self.output, self.log = output, None

    def on_train_start(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        """The state is restored."""
        self.log = StepLog(self.output / "steps.jsonl", trainer.global_rank, trainer.global_step)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """The optimizer has made a step."""
        self.log.step(trainer.global_step)

    def on_train_end(self, *_: Any) -> None:
        """All epochs are done."""
        self.log.end()


def main(args: argparse.Namespace) -> None:
    """Train."""
    saved = sorted(
        [*args.output.glob("hpc_ckpt_*.ckpt"), *args.output.glob("last.ckpt")], key=lambda path: path.stat().st_mtime
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=args.epochs, default_root_dir=args.output,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=args.output, save_last=True), Steps(args.output)],
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)],
    )  # fmt: skip
    data = images_of(args.data, args.images)
    loader = DataLoader(data, batch_size=args.batch_size // 2, shuffle=True, drop_last=True)
    trainer.fit(Classifier(args.wait), loader, ckpt_path=saved[-1] if saved else None)


if __name__ == "__main__":
    main(arguments())
