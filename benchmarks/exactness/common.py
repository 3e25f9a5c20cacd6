"""What both libraries' scripts train, and how it is recorded. Runs on every rank.

Data, model, augmentation and optimizer are what a user writes for any of them. All that is random draws from torch's
global generator, as users' code does.
"""

import gzip
import os
import signal
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

from hpc.base import program

SEED = 0
EPOCHS = 3
GLOBAL_BATCH = 100
CHECKPOINT_EVERY = 60
_HEADER_BYTES = {"images-idx3": 16, "labels-idx1": 8}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """One run: whole, cut, or resumed."""

    data: Path
    """Directory of the IDX files."""
    out: Path
    """File of the final weights; the checkpoints lie beside it."""
    variant: str
    """Which of the library's ways to save and resume."""
    until: int | None = None
    """Step after whose checkpoint the run kills itself, a multiple of CHECKPOINT_EVERY."""
    resume: int | None = None
    """Step to resume from."""
    workers: int = 0
    """Loader processes per rank."""
    randomness: bool = True
    """Augment and drop out; without it, only the order of the images and the first weights are random."""

    @property
    def checkpoints(self) -> Path:
        """Return where the library writes its checkpoints."""
        return self.out.parent / "checkpoints"


def arguments() -> Arguments:
    """Return the arguments of the command line."""
    return program.parse(Arguments, sys.argv[1:], sys.argv[0])


def read_idx(data: Path, part: str, kind: str) -> Tensor:
    """Return the uint8 content of a part's (`train`, `t10k`) compressed file (`images-idx3`, `labels-idx1`), flat."""
    raw = gzip.decompress((data / f"{part}-{kind}-ubyte.gz").read_bytes())
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8, offset=_HEADER_BYTES[kind]).copy())


def read_part(data: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return images (float [n, 1, 28, 28], about -1 to 1) and labels (int64 [n]) of a part."""
    images = read_idx(data, part, "images-idx3").view(-1, 1, 28, 28).float() / 127.5 - 1
    return images, read_idx(data, part, "labels-idx1").long()


class Images(Dataset[tuple[Tensor, Tensor]]):
    """The training images, each randomly cropped (from 2 pixels of padding) and flipped when it is fetched."""

    def __init__(self, data: Path, *, augment: bool) -> None:
        self.images, self.labels = read_part(data, "train")
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augment:
            top, left, mirrored = (*torch.randint(0, 5, (2,)).tolist(), torch.rand(()).item() < 0.5)
            image = functional.pad(image, (2, 2, 2, 2), value=-1)[:, top : top + 28, left : left + 28]
            image = image.flip(2) if mirrored else image
        return image, self.labels[index]


class RememberingImages(Images):
    """Images with their process's generator as a state that torchdata's StatefulDataLoader saves and restores."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the process that fetches: a loader worker, or the rank."""
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with what `state_dict` returned."""
        torch.set_rng_state(state["generator"])


def build_model(*, dropout: bool) -> nn.Sequential:
    """Make a small convolutional network with batch normalisation and dropout."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.25 if dropout else 0.0), nn.Linear(32 * 7 * 7, 10)),
    )


def build_optimizer(model: nn.Module, steps: int) -> tuple[SGD, CosineAnnealingLR]:
    """Make SGD with momentum, and a cosine schedule over so many steps."""
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return optimizer, CosineAnnealingLR(optimizer, T_max=steps)


class Trace:
    """Checksums of what this rank saw in each step, to tell what went another way after a cut."""

    def __init__(self) -> None:
        self.labels: dict[int, int] = {}
        self.images: dict[int, int] = {}

    def note(self, step: int, images: Tensor, labels: Tensor) -> None:
        """Record the batch of a step. The labels' sequence stands for the order: augmentation does not touch it."""
        self.labels[step] = zlib.crc32(labels.numpy().tobytes())
        self.images[step] = zlib.crc32(images.numpy().tobytes())


def die() -> None:
    """End as a power cut would: nothing is flushed or closed."""
    os.kill(os.getpid(), signal.SIGKILL)


@torch.no_grad()
def write_result(args: Arguments, model: nn.Module, optimizer: Any, trace: Trace) -> None:
    """Test the model, and write all that is compared."""
    images, labels = read_part(args.data, "t10k")
    correct = (model.eval()(images).argmax(1) == labels).float().mean().item()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"state": state, "accuracy": correct, "labels": trace.labels, "images": trace.images}, args.out)
