"""Image folders: a directory of class directories of images, decoded when they are asked for.

Runs on every rank and in its loader workers. Pillow scales the wanted part of an image in one go; torchvision, whose
import takes every rank two seconds, is not needed.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hpc.errors import UserError
from training.augment import Augmentation, Box, center_crop, random_resized_crop
from training.layout import is_class_directory, is_image
from training.plan import Request

# Part of the shorter side that is looked at in an evaluation: the usual 224 of 256 pixels.
_CENTER = 224 / 256


@dataclass(frozen=True, kw_only=True)
class FolderImages:
    """Images by index. Paths are packed into one array: workers that touch a list of strings would copy its pages."""

    root: Path
    names: np.ndarray
    """Paths below `root` as bytes [n]."""
    labels: Tensor
    """int64 [n]"""
    size: int
    augmentation: Augmentation | None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor]:
        """The images (uint8 [n, 3, size, size]) and labels (int64 [n]) of a request."""
        images = torch.empty(len(request.indices), 3, self.size, self.size, dtype=torch.uint8)
        for place, index in enumerate(request.indices):
            images[place] = self._image(index, request.epoch)
        return images, self.labels[list(request.indices)]

    def _image(self, index: int, epoch: int | None) -> Tensor:
        path = self.root / os.fsdecode(self.names[index])
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"{path} cannot be read as an image ({error}): replace or remove it") from error
        box, flip = self._view(index, epoch, image.width, image.height)
        scaled = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if flip:
            scaled = scaled.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(scaled)).permute(2, 0, 1)

    def _view(self, index: int, epoch: int | None, width: int, height: int) -> tuple[Box, bool]:
        """Which part of an image to show, and whether mirrored."""
        augmentation = self.augmentation
        if epoch is None or augmentation is None:
            return center_crop(width, height, _CENTER), False
        crop = augmentation.crop
        box = random_resized_crop(augmentation, epoch, index, width, height) if crop else center_crop(width, height, 1)
        return box, bool(augmentation.flips(epoch, torch.tensor([index])))

    def part(self, indices: Tensor, augmentation: Augmentation | None) -> "FolderImages":
        """Some of the images, as a source of their own."""
        return FolderImages(
            root=self.root,
            names=self.names[indices.numpy()],
            labels=self.labels[indices],
            size=self.size,
            augmentation=augmentation,
        )


def scan_classes(root: Path) -> tuple[str, ...]:
    """The names of the class directories, sorted: a class's number is its place."""
    with os.scandir(root) as entries:
        return tuple(sorted(entry.name for entry in entries if is_class_directory(entry)))


def scan_folder(root: Path, classes: tuple[str, ...], size: int) -> FolderImages:
    """List the images of all classes.

    Raises:
        UserError: a class directory is not among `classes`, or a class of the training set is empty.
    """
    unknown = sorted(set(scan_classes(root)) - set(classes))
    if unknown:
        raise UserError(f"{root / unknown[0]} is a class that the training set does not have: remove it or add it")
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = _images_in(root / name)
        names += (os.fsencode(f"{name}/{image}") for image in found)
        labels += [label] * len(found)
    return FolderImages(
        root=root, names=np.array(names, dtype=np.bytes_), labels=torch.tensor(labels), size=size, augmentation=None
    )


def _images_in(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if is_image(entry.name))
