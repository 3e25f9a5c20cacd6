"""PyTorch's DDP with Fashion-MNIST: an epoch loop that continues in the middle of an epoch. Runs once per rank.

hpc submit --nodes 2 --gpus-per-node 4 --data fashion-mnist/ -- examples/ddp/train.py --data {data}

A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last snapshot, about a
second of work.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchrelay import report, state


def read_idx(path: Path, skip: int) -> torch.Tensor:
    """The bytes of an IDX file after its header."""
    return torch.frombuffer(bytearray(path.read_bytes()[skip:]), dtype=torch.uint8)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    distributed.init_process_group("nccl" if use_gpu else "gloo")
    torch.manual_seed(0)
    images = read_idx(args.data / "train-images-idx3-ubyte", 16).view(-1, 784).float() / 255
    labels = read_idx(args.data / "train-labels-idx1-ubyte", 8).long()
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    with state(model=model, optimizer=optimizer) as saved:
        for epoch in saved.epochs(args.epochs):
            sampler.set_epoch(epoch)
            for inputs, targets in saved.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
                loss.backward()
                optimizer.step()
                report(step=saved.step, epoch=epoch, loss=loss)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
