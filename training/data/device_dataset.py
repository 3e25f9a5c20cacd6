"""Data sets that lie on a rank's device as a whole, which then makes the batches. Runs on every rank.

Only images in memory can be there: they are shifted, mirrored and erased by the same operations on any device, so a
rank gets the same images, bit by bit, wherever its data lie.
"""

from dataclasses import replace

import torch

from hpc.core.errors import UserError
from training.config.train_config import TrainConfig
from training.data.dataset import Data, MemoryImages, SyntheticImages
from training.data.loader import ImageSource

# A model that needs all of a GPU must still fit, so `auto` takes a small part of it. It is enough for the MNIST family
# and CIFAR on any GPU.
_AUTO_SHARE = 1 / 10


def move_to_device(config: TrainConfig, data: Data, device: torch.device) -> Data:
    """The data, on the device if --data-on-device asks for it; `auto`: on a GPU with ten times their size free.

    Raises:
        UserError: --data-on-device is on, and they cannot be there.
    """
    wanted = config.data_on_device
    if wanted == "off" or (wanted == "auto" and device.type == "cpu"):
        return data
    parts = {name: part for name in ("train", "val", "test") if (part := getattr(data, name)) is not None}
    reason = _why_not(list(parts.values()), device, wanted)
    if reason and wanted == "on":
        raise UserError(f"--data-on-device is on, but {reason}")
    if reason:
        return data
    moved = {name: replace(part, images=part.images.to(device)) for name, part in parts.items()}
    return replace(data, on_device=True, **moved)


def _why_not(parts: list[ImageSource], device: torch.device, wanted: str) -> str:
    """Why the data cannot be on the device, and what to use; empty if they can."""
    needed = 0
    for part in parts:
        if not isinstance(part, MemoryImages | SyntheticImages):
            return "the images of a folder or of packed data are cropped on the CPU: use auto, or leave it out"
        if isinstance(part, MemoryImages) and part.augmentation is not None and part.augmentation.needs_cpu:
            return "the augmentation runs on the CPU: use auto, or leave it out"
        needed += part.images.nbytes
    return "" if device.type == "cpu" else too_large(needed, torch.cuda.mem_get_info(device)[0], wanted)


def too_large(needed: int, free: int, wanted: str) -> str:
    """Why images of `needed` bytes do not fit into a GPU with `free` bytes, and what to use; empty if they fit."""
    fit = needed <= free * (_AUTO_SHARE if wanted == "auto" else 1)
    return "" if fit else f"the images take {needed / 1e9:.1f} GB, and the GPU has {free / 1e9:.1f} GB free: use auto"
