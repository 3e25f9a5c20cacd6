"""The same training with the loops of `docs/tutorials/own-script.md`: what `hpc submit -- script.py` runs."""

import time

import torch
from common import arguments, images_of, network, optimizer_of
from step_log import StepLog
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchrelay import report, state


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
        for epoch in saved.epochs(args.epochs):
            sampler.set_epoch(epoch)
            for images, labels in saved.batches(loader):
                optimizer.zero_grad()
                loss = loss_of(model(images), labels)
                loss.backward()
                time.sleep(args.wait)
                optimizer.step()
                log.step(saved.step)
                report(step=saved.step, epoch=epoch, loss=loss)
    log.end()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
