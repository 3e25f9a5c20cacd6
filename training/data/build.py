"""Opens a data set of any layout, holds out a part for validation, and sets up the augmentation.

Runs on every rank. Images in memory may be on the rank's device, which then makes the batches. The same operations
shift, mirror and erase images on any device, so the images are the same, bit by bit.
"""

import hashlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpc.base.errors import UserError
from hpc.base.text import file_name
from training.config.dataset_layout import DataLayout, image_roots
from training.config.model_names import OWN_MODELS
from training.config.packed_index import read_index
from training.config.rules import parse_crop_pct
from training.config.train_config import TrainConfig, size_in_epoch
from training.data.dataset import Data, ImageDataset, MemoryImages, SyntheticImages, open_part
from training.data.file_index import build_index, deserialize
from training.data.image_folder import FolderImages
from training.data.in_memory import class_names, read_cifar, read_cifar_names, read_digits, read_idx_pair
from training.data.transforms.augment import make_augmentation
from training.runtime.counter_rng import Purpose, derive_key, permutation

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SAMPLED_FOR_STATISTICS = 5000
_SYNTHETIC_STEPS, _SYNTHETIC_POOL = 100, 1024
# The share of a GPU's free memory that images may take, since the model must still fit. It is enough for the MNIST
# family and CIFAR on any GPU.
_SHARE_OF_GPU = 1 / 10

_Pair = tuple[Tensor, Tensor]


def load_data(config: TrainConfig, layout: DataLayout, folder_size: int, file_index: bytes = b"") -> Data:
    """Open the data. If there is no validation set, hold out a part of the training set, chosen by the seed.

    Images of a folder and packed images are resized to `folder_size` pixels, or in evaluations to --eval-image-size if
    given. For an image folder, `file_index` comes from rank 0's `load_or_build_index`; if empty, it is built here.
    Raises UserError if files are missing, damaged, or do not fit together.
    """
    as_dataset = partial(
        ImageDataset,
        size=folder_size,
        crop_pct=float(parse_crop_pct(config.eval_crop_pct)),
        interpolation=config.interpolation,
    )
    if layout.kind == "image-folder":
        files = deserialize(file_index) if file_index else build_index(layout)
        parts = {}
        for name, root in image_roots(layout).items():
            store, labels = FolderImages(root=root, names=files.parts[name].names), files.parts[name].labels
            parts[name] = as_dataset(store=store, labels=torch.from_numpy(labels))
        return _split(config, layout, parts, files.classes)
    if layout.kind == "packed":
        index, parts = read_index(layout.path), {}
        for part in index.parts:
            packed, of_part = open_part(layout.path, index, part)
            parts[part.name] = as_dataset(store=packed, labels=of_part)
        return _split(config, layout, parts, tuple(map(file_name, index.classes)))
    if layout.kind == "idx":
        train = read_idx_pair(layout.train, "train")
        test = read_idx_pair(layout.test, "test") if layout.test else None
        return _load_in_memory(config, layout, train, test, class_names(train[1], int(train[1].max()) + 1))
    if layout.kind == "digits":
        train, test = (read_digits(layout.path, part) for part in ("train", "test"))
        return _load_in_memory(config, layout, train, test, class_names(train[1], 10))
    names = read_cifar_names(layout.path, layout.kind)
    train, test = (read_cifar(layout.path, layout.kind, part, len(names)) for part in ("train", "test"))
    return _load_in_memory(config, layout, train, test, names)


def _load_in_memory(
    config: TrainConfig, layout: DataLayout, everything: _Pair, tested: _Pair | None, classes: tuple[str, ...]
) -> Data:
    images, labels = everything
    if tested and len(tested[1]) and tested[1].max() > labels.max():
        raise UserError(f"the test set has label {tested[1].max()}, but the training set ends at {labels.max()}")
    # Measure each channel over evenly spaced images.
    some = images[:: max(1, len(images) // _SAMPLED_FOR_STATISTICS)].double() / 255
    std, mean = torch.std_mean(some, dim=(0, 2, 3), correction=0)
    means = tuple(mean.tolist())
    channels, height, width = images.shape[1:]
    held_out, kept = _hold_out(config, len(labels))
    augmentation = make_augmentation(config, layout.kind, means)
    train = MemoryImages(images=images[kept], labels=labels[kept], title="the training set", augmentation=augmentation)
    val = MemoryImages(images=images[held_out], labels=labels[held_out], title="the validation set")
    test = MemoryImages(images=tested[0], labels=tested[1], title="the test set") if tested else None
    return Data(
        train=train,
        val=val if len(held_out) else None,
        test=test,
        classes=classes,
        mean=means,
        std=tuple(std.clamp(min=1 / 255).tolist()),
        channels=channels,
        shape=(height, width),
        in_memory=True,
        # Resizing and policies take so long on the CPU, image by image, that loader workers pay off.
        cheap=not (augmentation.resizes or augmentation.policy),
        fingerprint=_fingerprint(train, test),
    )


def _split(config: TrainConfig, layout: DataLayout, parts: dict[str, ImageDataset], classes: tuple[str, ...]) -> Data:
    """Return the data of an image folder or of packed images. A part of `train` is held out if there is no `val`."""
    train, val, test = parts["train"], parts.get("val"), parts.get("test")
    if val is None:
        held_out, kept = _hold_out(config, len(train))
        val, train = train.part(held_out) if len(held_out) else None, train.part(kept)
    size = train.size
    val, test = (part and replace(part, size=config.eval_image_size or size) for part in (val, test))
    augmentation = make_augmentation(config, layout.kind, _IMAGENET_MEAN)
    return Data(
        train=replace(train, augmentation=augmentation, size_in_epoch=partial(size_in_epoch, config, size)),
        val=val,
        test=test,
        classes=classes,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
        channels=3,
        shape=(size, size),
        in_memory=False,
        cheap=False,
        fingerprint=_fingerprint(train, val, test),
    )


def synthetic_data(config: TrainConfig, size: int) -> Data:
    """Return generated images of `size` x `size` pixels: 100 steps per epoch, and no validation or test set."""
    classes = 10 if config.model in OWN_MODELS else 1000
    shape = (min(config.batch_size, _SYNTHETIC_POOL), 3, size, size)
    pool = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(config.seed))
    if torch.cuda.is_available():
        pool = pool.pin_memory()
    labels = torch.arange(_SYNTHETIC_STEPS * config.batch_size) % classes
    return Data(
        train=SyntheticImages(images=pool, labels=labels),
        val=None,
        test=None,
        classes=tuple(map(str, range(classes))),
        mean=(0.5,) * 3,
        std=(0.29,) * 3,
        channels=3,
        shape=(size, size),
        in_memory=False,
        cheap=True,
        fingerprint="synthetic",
    )


def _hold_out(config: TrainConfig, samples: int) -> tuple[Tensor, Tensor]:
    """Return the sorted indices to hold out, and the sorted indices to train on."""
    order = permutation(derive_key(config.seed, Purpose.HOLD_OUT), samples)
    count = round(samples * config.val_split)
    if count == samples:
        raise UserError(f"--val-split is {config.val_split}, which leaves nothing of {samples} to train on")
    return order[:count].sort().values, order[count:].sort().values


def _fingerprint(*sources: MemoryImages | ImageDataset | None) -> str:
    digest = hashlib.sha256()
    for source in sources:
        if source is not None:
            digest.update(f"{len(source)} samples".encode())
            digest.update(source.labels.numpy().tobytes())
            if isinstance(source, ImageDataset):
                digest.update(source.store.identity())
    return digest.hexdigest()


def move_to_device(config: TrainConfig, data: Data, device: torch.device) -> Data:
    """Move the images to a GPU, if they fit into a tenth of its free memory, and unless --data-on-device is off.

    Images that the CPU crops or augments one by one stay where they are.
    """
    if config.data_on_device == "off" or device.type == "cpu" or not data.cheap:
        return data
    needed = sum(part.images.nbytes for part in _parts(data).values())
    return data if needed > torch.cuda.mem_get_info(device)[0] * _SHARE_OF_GPU else moved(data, device)


def moved(data: Data, device: torch.device) -> Data:
    """Return the data with all images on the device."""
    parts = {name: replace(part, images=part.images.to(device)) for name, part in _parts(data).items()}
    return replace(data, on_device=True, **parts)


def _parts(data: Data) -> dict[str, Any]:
    return {name: part for name in ("train", "val", "test") if (part := getattr(data, name)) is not None}
