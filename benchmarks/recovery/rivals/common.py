"""What the contenders of the benchmarks train: flags, network, optimizer and images. Runs on every rank.

Needs torch alone: it is imported in the rivals' environment and in ours. A step takes as long as the network needs on a
CPU, and a fixed wait, which stands for the time that a GPU would compute: so several trainings share two cores without
disturbing one another.
"""

import argparse
import gzip
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SIZE = 28


def arguments() -> argparse.Namespace:
    """Read the flags of each training script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="the IDX files of Fashion-MNIST, compressed or not")
    parser.add_argument("--output", type=Path, required=True, help="shared directory: checkpoints and the step log")
    parser.add_argument("--images", type=int, default=20_000, help="the first ones of the data set: an epoch")
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds of each step beside the network")
    parser.add_argument("--epochs", type=int, default=100_000)
    parsed = parser.parse_args()
    parsed.output.mkdir(parents=True, exist_ok=True)
    return parsed


def network() -> nn.Module:
    """Make the layers of our `small-cnn` for 28 x 28 pixels: 106,000 weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def images_of(directory: Path, count: int) -> TensorDataset:
    """Return the first training images, as float [count, 1, 28, 28], and their labels."""
    images = _read(directory / "train-images-idx3-ubyte", 16, count * SIZE * SIZE).view(-1, 1, SIZE, SIZE)
    return TensorDataset(images.float() / 255, _read(directory / "train-labels-idx1-ubyte", 8, count).long())


def _read(path: Path, header: int, length: int) -> Tensor:
    with path.open("rb") if path.exists() else gzip.open(f"{path}.gz") as file:
        file.read(header)
        return torch.frombuffer(bytearray(file.read(length)), dtype=torch.uint8)
