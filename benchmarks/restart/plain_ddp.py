"""A DDP training for torchrun written by hand, as torch's tutorials do it, for `benchmarks/restart` and `start.py`.

    torchrun --nproc-per-node 2 benchmarks/restart/plain_ddp.py --data DIRECTORY --checkpoint FILE

Trains on torchvision's FashionMNIST, made tensors once, and saves model and optimizer on rank 0, which every
rank loads when it starts again. It imports nothing of Torchrelay's but, with --model small-cnn, the model.
"""

from benchmarks.restart.marks import mark

if __name__ == "__main__":
    mark("program")

import argparse
from pathlib import Path

import torch
import torchvision
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms.v2.functional import resize

if __name__ == "__main__":
    mark("imported")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="directory with FashionMNIST/raw")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--model", default="small-cnn")
    parser.add_argument("--image-size", type=int, default=28)
    parser.add_argument("--batch-size", type=int, default=512, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--save-every", type=int, default=10, help="steps; an epoch is long where steps are slow")
    parser.add_argument("--steps", type=int, default=10**9)
    return parser.parse_args()


def load(options: argparse.Namespace) -> TensorDataset:
    """Read the training set into memory: as fast as torch's own data sets can be read."""
    found = torchvision.datasets.FashionMNIST(options.data)
    images = found.data[:, None].float().sub(73).div(90)
    return TensorDataset(images, found.targets)


def make_model(options: argparse.Namespace) -> nn.Module:
    """Make the network, for images of one channel."""
    if options.model == "small-cnn":
        from training.models.small_models import small_cnn  # noqa: PLC0415  # the one thing that a user would copy

        return small_cnn(10, 1, options.image_size)
    made: nn.Module = torchvision.models.get_model(options.model, num_classes=10)
    return made


def prepared(images: Tensor, options: argparse.Namespace) -> Tensor:
    """Return a batch as the model takes it."""
    if options.model == "small-cnn":
        return images
    resized: Tensor = resize(images.expand(-1, 3, -1, -1), [options.image_size] * 2)
    return resized


def main() -> None:
    """Train."""
    options = arguments()
    distributed.init_process_group("gloo")
    mark("connected")
    data = load(options)
    torch.manual_seed(0)
    model = make_model(options)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    step, epoch = 0, 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, epoch = saved["step"], saved["epoch"]
    mark("restored")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, options.batch_size // world_size, sampler=sampler, drop_last=True)
    is_first = True
    while True:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(prepared(images, options)), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if is_first:
                mark("stepped")
                is_first = False
            if step % options.save_every == 0 and rank == 0:
                save(options.checkpoint, model.module, optimizer, step, epoch)
            if step >= options.steps:
                distributed.destroy_process_group()
                return
        epoch += 1


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, epoch: int) -> None:
    """Write the state, whole or not at all."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "epoch": epoch}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
