"""Hugging Face Accelerate: `state()` saves what `prepare` returns. Runs once per rank.

hpc submit --nodes 2 --gpus-per-node 4 --python ENV/bin/python -- examples/accelerate/train.py --epochs 10

A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last snapshot, about a
second of work.
"""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchrelay import report, state


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    # Without this, the order of an epoch depends on all epochs before it, and would be another one after a restart.
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=order)
    torch.manual_seed(1)
    inputs = torch.randn(1600, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))

    with state(model=model, optimizer=optimizer, schedule=schedule) as saved:
        for epoch in saved.epochs(args.epochs):
            loader.set_epoch(epoch)
            for inputs, targets in saved.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                report(step=saved.step, epoch=epoch, loss=loss)
    accelerator.end_training()


if __name__ == "__main__":
    main()
