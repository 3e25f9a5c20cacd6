import os
import time

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        time.sleep(0.03)
        return (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch} done", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


if __name__ == "__main__":
    seed_everything(0)
    data = TensorDataset(torch.randn(160, 4))
    ranks, devices = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=ranks // devices,
        max_epochs=40,
        log_every_n_steps=5,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True, every_n_epochs=1)],
        logger=CSVLogger("logs"),
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=8, shuffle=True, num_workers=1), ckpt_path="last")
