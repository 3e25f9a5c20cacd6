"""The same training with our three calls of `docs/tutorials/own-script.md`: what `hpc submit -- script.py` runs."""

import sys
import time
from itertools import islice

import torch
from common import arguments, images_of, network, optimizer_of
from step_log import StepLog
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from training.relay import report, should_stop, state


def main() -> None:
    """Train."""
    args = arguments()
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    data = images_of(args.data, args.images)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size // ranks, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(network())
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
    with state(model=model, optimizer=optimizer) as saved:
        log = StepLog(args.output / "steps.jsonl", rank, saved.step)
        while saved.step < args.epochs * len(loader):
            epoch, skip = divmod(saved.step, len(loader))
            sampler.set_epoch(epoch)
            for images, labels in islice(loader, skip, None):
                optimizer.zero_grad()
                loss = loss_of(model(images), labels)
                loss.backward()
                time.sleep(args.wait)
                optimizer.step()
                saved.step += 1
                log.step(saved.step)
                report(step=saved.step, epoch=epoch, loss=loss)
                if should_stop():
                    sys.exit(0)
    log.end()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
