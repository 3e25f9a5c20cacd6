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
    if wanted == "off" or (wanted == "auto" and (device.type == "cpu" or _needs_cpu(data))):
        return data
    reason = _why_not(data, device, wanted)
    if reason and wanted == "on":
        raise UserError(f"--data-on-device is on, but {reason}")
    if reason:
        return data
    return replace(
        data,
        train=_moved(data.train, device),
        val=data.val and _moved(data.val, device),
        test=data.test and _moved(data.test, device),
        on_device=True,
    )


def _needs_cpu(data: Data) -> bool:
    """Whether the flags ask for crops or a policy that run on the CPU; with `on`, TrainConfig refuses them."""
    train = data.train
    return isinstance(train, MemoryImages) and train.augmentation is not None and train.augmentation.needs_cpu


def _why_not(data: Data, device: torch.device, wanted: str) -> str:
    """Why the data cannot be on the device, and what to use; empty if they can."""
    sizes = [_bytes(part) for part in (data.train, data.val, data.test) if part]
    if None in sizes:
        return "the images of a folder or of packed data are cropped on the CPU: use auto, or leave it out"
    if device.type == "cpu":
        return ""
    return too_large(sum(filter(None, sizes)), torch.cuda.mem_get_info(device)[0], wanted)


def too_large(needed: int, free: int, wanted: str) -> str:
    """Why images of `needed` bytes do not fit into a GPU with `free` bytes, and what to use; empty if they fit."""
    fit = needed <= free * (_AUTO_SHARE if wanted == "auto" else 1)
    return "" if fit else f"the images take {needed / 1e9:.1f} GB, and the GPU has {free / 1e9:.1f} GB free: use auto"


def _bytes(source: ImageSource) -> int | None:
    """The bytes that a data set takes of the device; None: it cannot be there."""
    match source:
        case MemoryImages():
            return source.images.nbytes
        case SyntheticImages():
            return source.pool.nbytes
    return None


def _moved(source: ImageSource, device: torch.device) -> ImageSource:
    match source:
        case MemoryImages():
            return replace(source, images=source.images.to(device))
        case SyntheticImages():
            return replace(source, pool=source.pool.to(device))
    raise TypeError(source)
