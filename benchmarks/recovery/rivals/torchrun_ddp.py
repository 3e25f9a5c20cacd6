"""DDP under torchrun, written by hand, with a checkpoint per epoch as PyTorch's tutorial on fault tolerance has it.

"Fault-tolerant Distributed Training with torchrun": rank 0 saves model and optimizer after each epoch, and every rank
loads the file, if it is there, when it starts. Saved under a temporary name that is renamed: a file that was cut off by
the failure would be the rival's end.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import arguments, images_of, network, optimizer_of
from step_log import StepLog
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def save(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save what the next start needs."""
    temporary = path.with_suffix(".tmp")
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, temporary)
    temporary.rename(path)


def train(args: argparse.Namespace, after_step: Callable[[], object] = lambda: None) -> None:
    """Train; `after_step` is called after each step."""
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    data = images_of(args.data, args.images)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size // ranks, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(network())
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
    path, step = args.output / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    log = StepLog(args.output / "steps.jsonl", rank, step)
    while step < args.epochs * len(loader):
        sampler.set_epoch(step // len(loader))
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            time.sleep(args.wait)
            optimizer.step()
            step += 1
            log.step(step)
            after_step()
            if rank == 0 and step % len(loader) == 0:
                save(path, model, optimizer, step)
    log.end()
    distributed.destroy_process_group()


if __name__ == "__main__":
    train(arguments())
