"""Augments images: random crop, mirroring, color jitter, policy, random erasing. Runs on ranks and loader workers.

The result depends only on the seed, the epoch and the sample's index, not on the rank, the worker or the batch.
Crops, mirroring and erasing take numbered draws from an epoch's random streams (`counter_rng`), on the CPU, without
torchvision. Color jitter and policies are torchvision's and draw from torch's default generator, which is seeded for
each image and restored afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.config.dataset_layout import Kind
from training.config.rules import parse_crop_scale
from training.config.train_config import Interpolation, TrainConfig
from training.data.loader import to_device
from training.data.transforms.crop import Crop, CropBox, center_box, random_box
from training.data.transforms.random_erasing import RandomErasing
from training.runtime.counter_rng import Purpose, derive_key, rand_float, rand_int

# Number of draws per image in an epoch's random stream, and the position of each draw.
_DRAWS = 32
_ROW, _COLUMN, _FLIP, _BOX = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Augments the images of a training: with `resizes`, first one by one by `crop`; then together in `batch`."""

    seed: int
    resizes: bool
    """Whether images are cropped and resized one by one: always for folders and packed data."""
    area: tuple[float, float] | None = None
    """Least and greatest area of a random box, as shares of the image; None to crop the square in the middle."""
    interpolation: Interpolation = "bilinear"
    padding: float = 0.0
    """Largest shift of an image, as a share of its shorter side. Zeros fill the gap. 0 means no shift."""
    flip: bool = False
    """Whether to mirror a random half of the images."""
    policy: Callable[[Any], Tensor] | None = None
    """torchvision's color jitter and policy for one image (uint8 [C, H, W]) on the CPU; None for neither."""
    erasing: RandomErasing | None = None

    def crop(self, epoch: int, index: int, size: tuple[int, int]) -> Crop:
        """Return the crop of the sample with this number in `BatchRequest`, to be resized to `size`."""
        key = derive_key(self.seed, Purpose.AUGMENTATION, epoch)
        mirrored = self.flip and rand_float(key, index * _DRAWS + _FLIP) < 1 / 2
        box = partial(self._random_box, key, index, self.area) if self.area else center_box
        return Crop(box=box, size=size, interpolation=self.interpolation, mirrored=mirrored)

    def _random_box(self, key: int, index: int, area: tuple[float, float], height: int, width: int) -> CropBox:
        draws = (rand_float(key, index * _DRAWS + draw) for draw in range(_BOX, _DRAWS))
        return random_box(draws, height, width, area)

    def batch(self, epoch: int, indices: Tensor, images: Tensor) -> Tensor:
        """Return augmented images of one size (uint8 [n, C, H, W]). `images` may be overwritten.

        `indices` (int64 [n], on the CPU) are the samples' numbers in `BatchRequest`.
        """
        key = derive_key(self.seed, Purpose.AUGMENTATION, epoch)
        if self.padding:
            pixels = max(1, round(min(images.shape[2:]) * self.padding))
            images = _shift(images, pixels, key, indices)
        if self.flip and not self.resizes:
            # Here the upper half of the draws mirrors an image, in `crop` the lower half. Do not make them equal,
            # because a seed must keep its images.
            mirrored = to_device(rand_int(key, indices * _DRAWS + _FLIP, 2).bool(), images.device)
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        if self.policy is not None:
            for place, index in enumerate(indices.tolist()):
                # torch uses 32 bits of the key, so among many millions of samples, a few get the same changes, in no
                # pattern. `torch.manual_seed` would also seed the generators of GPUs.
                with torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(derive_key(self.seed, Purpose.AUGMENTATION, epoch, index))
                    images[place] = self.policy(images[place])
        return self.erasing.batch(epoch, indices, images) if self.erasing else images


def _shift(images: Tensor, padding: int, key: int, indices: Tensor) -> Tensor:
    """Pad images with zeros and crop a random window of the old size from each."""
    (count, _, height, width), device = images.shape, images.device
    padded = functional.pad(images, (padding,) * 4)
    drawn = torch.stack([rand_int(key, indices * _DRAWS + draw, 2 * padding + 1) for draw in (_ROW, _COLUMN)])
    top, left = to_device(drawn, device)
    rows = top[:, None] + torch.arange(height, device=device)
    columns = left[:, None] + torch.arange(width, device=device)
    # With advanced indices around a slice, the sliced dimension comes last.
    window = padded[torch.arange(count, device=device)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return window.permute(0, 3, 1, 2)


def make_augmentation(config: TrainConfig, kind: Kind, mean: tuple[float, ...]) -> Augmentation:
    """Return the augmentation that the flags ask for. What `auto` means depends on the kind of the data.

    `mean` is the mean of each channel, from 0 to 1. Random erasing fills the erased area with this color.
    """
    in_memory = kind not in {"image-folder", "packed"}
    are_digits = kind in {"idx", "digits"}
    usual_crop = "padded" if in_memory else "resized"
    crop = usual_crop if config.crop == "auto" else config.crop
    # For CIFAR 4 pixels of 32, as in He et al., "Deep residual learning for image recognition" (2015).
    padding = 1 / 28 if are_digits else 1 / 8
    # Normalization turns the mean color into zeros for the model.
    color = tuple(round(255 * channel) for channel in mean)
    erasing = RandomErasing(seed=config.seed, probability=config.random_erasing, color=color)
    return Augmentation(
        seed=config.seed,
        resizes=crop == "resized" or not in_memory,
        area=parse_crop_scale(config.crop_scale) if crop == "resized" else None,
        interpolation=config.interpolation,
        padding=padding if crop == "padded" else 0.0,
        flip=not are_digits if config.flip == "auto" else config.flip == "on",
        policy=_make_policy(config, of_photographs=not in_memory),
        erasing=erasing if config.random_erasing else None,
    )


def _make_policy(config: TrainConfig, *, of_photographs: bool) -> Callable[[Any], Tensor] | None:
    """Return torchvision's color jitter and policy as one function, or None if the flags ask for neither.

    AutoAugment: Cubuk et al. (2018). RandAugment: Cubuk et al. (2019). TrivialAugment: Müller and Hutter (2021).
    For RandAugment of large images, Pillow takes a third less time than tensors.
    """
    if config.auto_augment == "none" and not config.color_jitter:
        return None
    from torchvision.transforms import v2  # noqa: PLC0415  # takes two seconds

    mode, jitter = v2.InterpolationMode(config.auto_augment_interpolation), config.color_jitter
    makers: dict[str, Callable[[], Any]] = {
        "none": v2.Identity,
        "autoaugment": lambda: v2.AutoAugment(v2.AutoAugmentPolicy["IMAGENET" if of_photographs else "CIFAR10"], mode),
        "randaugment": lambda: v2.RandAugment(magnitude=config.randaugment_magnitude, interpolation=mode),
        "trivialaugment": lambda: v2.TrivialAugmentWide(interpolation=mode),
    }
    changes = [v2.ColorJitter(jitter, jitter, jitter)] if jitter else []
    changes.append(makers[config.auto_augment]())
    composed: Callable[[Any], Tensor]
    composed = v2.Compose([v2.ToPILImage(), *changes, v2.PILToTensor()] if of_photographs else changes)
    return composed
