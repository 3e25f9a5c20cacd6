"""Hugging Face Accelerate: `state()` saves what `prepare` returns. Runs once per rank.

hpc submit --nodes 2 --gpus-per-node 4 --python ENV/bin/python -- examples/accelerate/train.py --epochs 10

A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last snapshot, about a
second of work.
"""

import argparse
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from training.relay import report, should_stop, state


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(1)
    inputs = torch.randn(1600, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))

    with state(model=model, optimizer=optimizer, schedule=schedule) as saved:
        while saved.step < args.epochs * len(loader):
            epoch, skip = divmod(saved.step, len(loader))
            torch.manual_seed(epoch)  # the order of an epoch, when it is continued, too
            for inputs, targets in accelerator.skip_first_batches(loader, skip):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                saved.step += 1
                report(step=saved.step, epoch=epoch, loss=loss)
                if should_stop():
                    sys.exit(0)
    accelerator.end_training()


if __name__ == "__main__":
    main()
