"""Data sets that lie on a rank's device as a whole: batches are taken there, and augmented there. Runs on every rank.

What a rank sees is the same in every bit, wherever its data lie.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hpc.core.errors import UserError
from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchRequest
from training.data.dataset import Batch, Data, ImageSource, MemoryImages
from training.data.image_dataset import ImageDataset
from training.data.packed import PackedImages
from training.data.synthetic import SyntheticImages
from training.data.to_device import to_device
from training.data.transforms.augment import ImageAugmentation
from training.data.transforms.crop import EVALUATION_CROP, cut_all
from training.data.transforms.crop_box import center_box

# A model that needs all of a GPU must go on fitting: what `auto` takes must not be missed. It is enough for all of the
# MNIST family and CIFAR on any GPU, and for 40,000 packed images of 256 x 256 pixels on one of 80 GB.
_AUTO_SHARE = 1 / 10


@dataclass(frozen=True, kw_only=True)
class HeldPhotos:
    """Packed images on a device."""

    photos: ImageDataset
    """The same where they come from: names, labels, and what is done to them."""
    squares: Tensor
    """uint8 [n, 3, side, side], on the device, in the order of the photos."""
    corrupt: frozenset[int]
    """Places of those that could not be decoded."""

    @property
    def labels(self) -> Tensor:
        """int64 [n], on the CPU."""
        return self.photos.labels

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, request: BatchRequest) -> Batch:
        """The images (uint8 [n, 3, size, size], on the device) of a request."""
        met = set[int]()
        shown = [self.photos.next_readable(i, met)[0] if i in self.corrupt else i for i in request.indices]
        places, indices, corrupt = (
            torch.tensor(values, dtype=torch.int64) for values in (shown, request.indices, sorted(met))
        )
        squares = self.squares[to_device(places, self.squares.device)]
        return Batch(self._look(places, squares, request.epoch), self.labels[places], indices, corrupt)

    def name(self, index: int) -> str:
        """The image's path."""
        return self.photos.name(index)

    def _look(self, places: Tensor, squares: Tensor, epoch: int | None) -> Tensor:
        augmentation: ImageAugmentation | None = self.photos.augmentation
        if epoch is not None and augmentation is not None:
            return augmentation.batch(epoch, places, squares)
        side = self.squares.shape[2]
        middle = torch.tensor(center_box(side, side, EVALUATION_CROP)).repeat(len(squares), 1)
        return cut_all(squares, middle, self.photos.size)


def move_to_device(config: TrainConfig, data: Data, device: torch.device, beat: Callable[[], object]) -> Data:
    """The data, on the device if --data-on-device says so; `auto`: on a GPU that has much more memory than they take.

    Args:
        config: says whether.
        data: as they were opened.
        device: of this rank.
        beat: is called from time to time while they are read.

    Raises:
        UserError: they shall be there and cannot.
    """
    wanted = config.data_on_device
    if wanted == "off" or (wanted == "auto" and device.type == "cpu"):
        return data
    reason = _why_not(config, data, device)
    if reason and wanted == "on":
        raise UserError(f"--data-on-device is on, but {reason}")
    if reason:
        return data
    parts = {name: part and _held(part, device, beat) for name, part in _parts(data).items()}
    return replace(data, **parts, on_device=True)  # type: ignore[arg-type]  # there is a training set


def _parts(data: Data) -> dict[str, ImageSource | None]:
    return {"train": data.train, "val": data.val, "test": data.test}


def _why_not(config: TrainConfig, data: Data, device: torch.device) -> str:
    """Why the data cannot be on the device, and what to use; empty if they can."""
    sizes = [_bytes(part) for part in _parts(data).values() if part]
    if None in sizes:
        return "images of a folder are decoded on the CPU: pack them (python -m training.pack), or use auto"
    if config.auto_augment != "none":
        return f"--auto-augment {config.auto_augment} works on the CPU: use --auto-augment none, or auto"
    if device.type == "cpu":
        return ""
    return too_large(sum(filter(None, sizes)), torch.cuda.mem_get_info(device)[0], config.data_on_device)


def too_large(needed: int, free: int, wanted: str) -> str:
    """Why so many bytes do not fit into a device with so many free ones, and what to use; empty if they do."""
    fit = needed <= free * (_AUTO_SHARE if wanted == "auto" else 1)
    return "" if fit else f"the images take {needed / 1e9:.1f} GB, and the GPU has {free / 1e9:.1f} GB free: use auto"


def _bytes(source: ImageSource) -> int | None:
    """What a source would take of the device; None: it cannot be there."""
    match source:
        case MemoryImages():
            return source.images.nbytes
        case SyntheticImages():
            return source.pool.nbytes
        case ImageDataset(album=PackedImages() as album):
            return album.nbytes
    return None


def _held(source: ImageSource, device: torch.device, beat: Callable[[], object]) -> ImageSource:
    """A source that can be on the device, there."""
    match source:
        case MemoryImages():
            return replace(source, images=source.images.to(device))
        case SyntheticImages():
            return replace(source, pool=source.pool.to(device))
        case ImageDataset(album=PackedImages() as album):
            return HeldPhotos(photos=source, squares=_squares(album, device, beat), corrupt=album.corrupt_among())
    raise TypeError(source)


def _squares(album: PackedImages, device: torch.device, beat: Callable[[], object]) -> Tensor:
    """All the images of an album (uint8 [n, 3, side, side])."""
    squares = torch.empty(len(album), album.side, album.side, 3, dtype=torch.uint8, device=device)
    for first, images in album.pieces():
        squares[first : first + len(images)].copy_(images)
        beat()
    return squares.permute(0, 3, 1, 2)
