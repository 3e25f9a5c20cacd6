"""Augmentation as a function of (seed, epoch, index of the image): the same whoever computes it, and whenever.

Runs on every rank and in its loader workers. Random numbers are counted in two ways. Crops, mirroring and erasing
take them from the epoch's streams, at places that belong to the image: on the CPU, wherever the images are, without
torchvision. The policies are torchvision's, which draws from torch's own generator: that one begins anew for every
image, at the number of its stream, and is put back afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from hpc.core.errors import UserError
from training.config.dataset_layout import Kind
from training.config.train_config import TrainConfig
from training.data.to_device import to_device
from training.data.transforms.crop import crop_and_resize, cut_all
from training.data.transforms.crop_box import CropBox, center_box, random_box
from training.data.transforms.random_erasing import RandomErasing
from training.runtime.counter_rng import Purpose, derive_key, rand_float, rand_int

# The random numbers that one image may take from the stream of an epoch.
_DRAWS = 32
_ROW, _COLUMN, _FLIP, _BOX = 0, 1, 2, 3

# Random resized crops: Szegedy et al., "Going deeper with convolutions" (2015), with the larger least area that short
# trainings do better with.
_AREA = (0.25, 1.0)


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What is usual for a kind of data."""

    crop: str
    flip: bool
    padding: float
    """Of padded crops, as a part of the side."""
    autoaugment: str
    """The data that AutoAugment's policy was found on."""


_PHOTOS = Usual(crop="resized", flip=True, padding=1 / 8, autoaugment="IMAGENET")
# He et al., "Deep residual learning for image recognition" (2015): 4 pixels of 32.
_CIFAR = Usual(crop="padded", flip=True, padding=4 / 32, autoaugment="CIFAR10")
_DIGITS = Usual(crop="padded", flip=False, padding=1 / 28, autoaugment="CIFAR10")
_USUAL: dict[Kind, Usual] = {
    "idx": _DIGITS,
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "image-folder": _PHOTOS,
    "packed": _PHOTOS,
}


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What is done to the images of a training set, in this order."""

    seed: int
    padding: int = 0
    """Shift images by at most so many pixels; 0: not."""
    flip: bool = False
    """Mirror half of the images."""
    transform: Callable[[Any], Tensor] | None = None
    """What torchvision does to one image, on the CPU; None: nothing."""
    erasing: RandomErasing | None = None

    @property
    def does_more(self) -> bool:
        """Whether it does anything but mirror and erase."""
        return bool(self.padding or self.transform)

    def batch(self, epoch: int, indices: Tensor, images: Tensor) -> Tensor:
        """The images (uint8 [n, C, H, W], on any device) with these indices (int64 [n]) as they look in an epoch."""
        key = derive_key(self.seed, Purpose.AUGMENTATION, epoch)
        if self.padding:
            images = _shift(images, self.padding, key, indices)
        if self.flip:
            images = _mirror(images, rand_int(key, indices * _DRAWS + _FLIP, 2).bool())
        if self.transform is not None and len(images):
            images = torch.stack([self.one(epoch, *each) for each in zip(indices.tolist(), images, strict=True)])
        return self.erasing.batch(epoch, indices, images) if self.erasing else images

    def one(self, epoch: int, index: int, image: Any) -> Tensor:
        """What torchvision makes of an image (Pillow's, or uint8 [C, H, W]) in an epoch."""
        assert self.transform is not None  # noqa: S101  # whoever asks has one
        with _drawing(derive_key(self.seed, Purpose.AUGMENTATION, epoch, index)):
            return self.transform(image)


@contextmanager
def _drawing(key: int) -> Iterator[None]:
    """Let torch's generator of the CPU begin at `key`, and put it back afterwards. Takes some microseconds.

    `torch.manual_seed` would begin those of the GPUs anew as well. Of the key torch takes 32 bits, so some of many
    million samples are changed alike, in no pattern.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@dataclass(frozen=True, kw_only=True)
class ImageAugmentation:
    """What is done to photographs of any size: a part of each becomes a square, then the same as in memory."""

    size: int | tuple[int, int]
    """Side of the squares, or height and width."""
    resized: bool
    """Random resized crops; else the square in the middle."""
    flip: bool
    """Mirror half of the images."""
    rest: Augmentation
    """What is done to the squares, without erasing."""
    erasing: RandomErasing | None = None

    def one(self, epoch: int, index: int, image: Tensor) -> Tensor:
        """What becomes of an image (uint8 [h, w, 3]) in an epoch, but for erasing: uint8 [3, size, size]."""
        square = crop_and_resize(image, self._box(epoch, index, *image.shape[:2]), self.size)
        if self.flip and rand_float(self._key(epoch), index * _DRAWS + _FLIP) < 1 / 2:
            square = square.flip(2)
        # A loader worker has one image at a time: what is not asked for must not cost it anything.
        return self.rest.batch(epoch, torch.tensor([index]), square[None])[0] if self.rest.does_more else square

    def batch(self, epoch: int, indices: Tensor, images: Tensor) -> Tensor:
        """What becomes of many (uint8 [n, C, h, w], on any device), whose indices (int64 [n]) are on the CPU."""
        boxes = [self._box(epoch, index, *images.shape[2:]) for index in indices.tolist()]
        squares = cut_all(images, torch.tensor(boxes, dtype=torch.int64).reshape(-1, 4), self.size)
        if self.flip:
            squares = _mirror(squares, rand_int(self._key(epoch), indices * _DRAWS + _FLIP, 2) == 0)
        return self.erase(epoch, indices, self.rest.batch(epoch, indices, squares))

    def erase(self, epoch: int, indices: Tensor, squares: Tensor) -> Tensor:
        """What comes last: of many at once, for the random numbers of one cost as much time."""
        return self.erasing.batch(epoch, indices, squares) if self.erasing else squares

    def _key(self, epoch: int) -> int:
        return derive_key(self.rest.seed, Purpose.AUGMENTATION, epoch)

    def _box(self, epoch: int, index: int, height: int, width: int) -> CropBox:
        """The part that is looked at."""
        if not self.resized:
            return center_box(height, width)
        key = self._key(epoch)
        places = (rand_float(key, index * _DRAWS + place) for place in range(_BOX, _DRAWS))
        return random_box(places, height, width, _AREA)


def memory_augmentation(
    config: TrainConfig, kind: Kind, shape: tuple[int, int, int], mean: tuple[float, ...]
) -> Augmentation | ImageAugmentation:
    """For images in memory, which keep their shape [C, H, W]: a model of another size gets them scaled on its device.

    A mirrored image is cropped and not the other way round, which is as likely to give any result.

    Raises:
        UserError: the policy is not for images with so many channels.
    """
    if config.auto_augment != "none" and shape[0] not in {1, 3}:
        raise UserError(
            f"--auto-augment is {config.auto_augment}, but the images have {shape[0]} channels: use --auto-augment none"
        )
    crop, flip = _crop_and_flip(config, kind)
    padding = max(1, round(min(shape[1:]) * _USUAL[kind].padding)) if crop == "padded" else 0
    policy, erasing = _policy(config, kind), _erasing(config, mean)
    rest = Augmentation(
        seed=config.seed, padding=padding, flip=flip, transform=_compose(policy) if policy else None, erasing=erasing
    )
    if crop != "resized":
        return rest
    rest = replace(rest, flip=False, erasing=None)
    return ImageAugmentation(size=shape[1:], resized=True, flip=flip, rest=rest, erasing=erasing)


def photo_augmentation(config: TrainConfig, size: int, mean: tuple[float, ...]) -> ImageAugmentation:
    """For photographs of any size, which become [3, size, size]."""
    crop, flip = _crop_and_flip(config, "image-folder")
    policy = _through_pillow(_policy(config, "image-folder"))
    padding = max(1, round(size * _USUAL["image-folder"].padding)) if crop == "padded" else 0
    rest = Augmentation(seed=config.seed, padding=padding, transform=_compose(policy) if policy else None)
    erasing = _erasing(config, mean)
    return ImageAugmentation(size=size, resized=crop == "resized", flip=flip, rest=rest, erasing=erasing)


def _through_pillow(policy: list[Any]) -> list[Any]:
    """A policy's changes of a square, as Pillow does them: RandAugment takes it a third less time than tensors."""
    if not policy:
        return []
    from torchvision.transforms import v2  # noqa: PLC0415

    return [v2.ToPILImage(), *policy, v2.PILToTensor()]


def _compose(steps: list[Any]) -> Callable[[Any], Tensor]:
    from torchvision.transforms import v2  # noqa: PLC0415

    return cast("Callable[[Any], Tensor]", v2.Compose(steps))


def _crop_and_flip(config: TrainConfig, kind: Kind) -> tuple[str, bool]:
    usual = _USUAL[kind]
    crop = usual.crop if config.crop == "auto" else config.crop
    return crop, usual.flip if config.flip == "auto" else config.flip == "on"


def _policy(config: TrainConfig, kind: Kind) -> list[Any]:
    """At most one policy, with torchvision's settings.

    AutoAugment: Cubuk et al. (2018). RandAugment: Cubuk et al. (2019). TrivialAugment: Müller and Hutter (2021).
    """
    if config.auto_augment == "none":
        return []
    from torchvision.transforms import v2  # noqa: PLC0415

    makers: dict[str, Callable[[], Any]] = {
        "autoaugment": lambda: v2.AutoAugment(v2.AutoAugmentPolicy[_USUAL[kind].autoaugment]),
        "randaugment": v2.RandAugment,
        "trivialaugment": v2.TrivialAugmentWide,
    }
    return [makers[config.auto_augment]()]


def _erasing(config: TrainConfig, mean: tuple[float, ...]) -> RandomErasing | None:
    """Random erasing, filled with the mean color, which is zero for the model."""
    if not config.random_erasing:
        return None
    color = tuple(round(255 * channel) for channel in mean)
    return RandomErasing(seed=config.seed, probability=config.random_erasing, color=color)


def _mirror(images: Tensor, mirrored: Tensor) -> Tensor:
    """The images, of which some (bool [n], on the CPU) are mirrored."""
    return torch.where(to_device(mirrored, images.device)[:, None, None, None], images.flip(3), images)


def _shift(images: Tensor, padding: int, key: int, indices: Tensor) -> Tensor:
    """Pad with zeros and cut a random window of the old size out of each image."""
    (count, _, height, width), device = images.shape, images.device
    padded = functional.pad(images, (padding,) * 4)
    drawn = torch.stack([rand_int(key, indices * _DRAWS + place, 2 * padding + 1) for place in (_ROW, _COLUMN)])
    top, left = to_device(drawn, device)
    rows = top[:, None] + torch.arange(height, device=device)
    columns = left[:, None] + torch.arange(width, device=device)
    # Advanced indices around a slice put the sliced dimension last.
    window = padded[torch.arange(count, device=device)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return window.permute(0, 3, 1, 2)
