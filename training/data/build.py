"""Opens a data set of any layout: reads it, holds out a part for validation, sets up the augmentation.

Runs on every rank.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hpc.core.errors import UserError
from training.config.dataset_layout import DataLayout
from training.config.model_names import OWN_MODELS
from training.config.packed_index import read_index
from training.config.train_config import TrainConfig
from training.data.cifar import read_cifar, read_cifar_names
from training.data.dataset import Data, ImageDataset, MemoryImages, SyntheticImages
from training.data.file_index import SplitIndex, build_index, deserialize
from training.data.idx import class_names, read_idx_pair
from training.data.image_folder import FolderImages
from training.data.packed import open_part
from training.data.transforms.augment import make_augmentation
from training.runtime.counter_rng import Purpose, derive_key, permutation

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SAMPLED_FOR_STATISTICS = 5000
_SYNTHETIC_STEPS, _SYNTHETIC_POOL = 100, 1024

_Pair = tuple[Tensor, Tensor]


def load_data(config: TrainConfig, layout: DataLayout, folder_size: int, file_index: bytes = b"") -> Data:
    """Open the data; without a validation set, hold out a part of the training set, chosen by seed.

    Args:
        config: how much to hold out, and how to augment.
        layout: where the data are.
        folder_size: side in pixels that the images of a folder or packed ones are resized to; in evaluations it is
            --eval-image-size, if given.
        file_index: of an image folder, as rank 0's `load_or_build_index` returned it; empty: it is built here.

    Raises:
        UserError: files are missing, torn, or do not fit together.
    """
    if layout.kind == "image-folder":
        return _load_folder(config, layout, folder_size, file_index)
    if layout.kind == "packed":
        return _load_packed(config, layout, folder_size)
    if layout.kind == "idx":
        train = read_idx_pair(layout.train, "train")
        test = read_idx_pair(layout.test, "test") if layout.test else None
        return _load_in_memory(config, layout, train, test, class_names(train[1], int(train[1].max()) + 1))
    names = read_cifar_names(layout.path, layout.kind)
    parts = [read_cifar(layout.path, layout.kind, part, len(names)) for part in ("train", "test")]
    return _load_in_memory(config, layout, parts[0], parts[1], names)


def _load_in_memory(
    config: TrainConfig, layout: DataLayout, everything: _Pair, tested: _Pair | None, classes: tuple[str, ...]
) -> Data:
    images, labels = everything
    _check_labels(labels, tested[1] if tested else None)
    mean, std = _statistics(images)
    channels, height, width = images.shape[1:]
    held_out, kept = _hold_out(config, len(labels))
    augmentation = make_augmentation(config, layout.kind, (channels, height, width), mean)
    train = MemoryImages(images=images[kept], labels=labels[kept], title="the training set", augmentation=augmentation)
    val = MemoryImages(images=images[held_out], labels=labels[held_out], title="the validation set")
    test = MemoryImages(images=tested[0], labels=tested[1], title="the test set") if tested else None
    return Data(
        train=train,
        val=val if len(held_out) else None,
        test=test,
        classes=classes,
        mean=mean,
        std=std,
        channels=channels,
        shape=(height, width),
        in_memory=True,
        cheap=not augmentation.needs_cpu,
        fingerprint=_fingerprint(train, test),
    )


def _load_folder(config: TrainConfig, layout: DataLayout, size: int, file_index: bytes) -> Data:
    index = deserialize(file_index) if file_index else build_index(layout)
    roots = {"train": layout.train, "val": layout.val, "test": layout.test}
    parts = {name: _open_folder(root, index.parts[name], size) for name, root in roots.items() if root}
    return _split(config, layout, parts, index.classes)


def _open_folder(root: Path, part: SplitIndex, size: int) -> ImageDataset:
    store = FolderImages(root=root, names=part.names)
    return ImageDataset(store=store, labels=torch.from_numpy(part.labels), size=size)


def _load_packed(config: TrainConfig, layout: DataLayout, size: int) -> Data:
    index = read_index(layout.path)
    parts = {
        part.name: ImageDataset(store=store, labels=labels, size=size)
        for part in index.parts
        for store, labels in [open_part(layout.path, index, part)]
    }
    return _split(config, layout, parts, index.classes)


def _split(config: TrainConfig, layout: DataLayout, parts: dict[str, ImageDataset], classes: tuple[str, ...]) -> Data:
    """The data of a folder or of packed images, whose `train` is augmented; holds out `val` if there is none."""
    train, val, test = parts["train"], parts.get("val"), parts.get("test")
    if val is None:
        held_out, kept = _hold_out(config, len(train))
        val, train = train.part(held_out) if len(held_out) else None, train.part(kept)
    size = train.size
    val, test = (part and replace(part, size=config.eval_image_size or size) for part in (val, test))
    augmentation = make_augmentation(config, layout.kind, (3, size, size), _IMAGENET_MEAN)
    return Data(
        train=replace(train, augmentation=augmentation),
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
    """Generated images of the size that the model sees: 100 steps an epoch, and no validation or test set."""
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
    """Indices to hold out and indices to train on, each sorted."""
    order = permutation(derive_key(config.seed, Purpose.HOLD_OUT), samples)
    count = round(samples * config.val_split)
    if count == samples:
        raise UserError(f"--val-split is {config.val_split}, which leaves nothing of {samples} to train on")
    return order[:count].sort().values, order[count:].sort().values


def _check_labels(train: Tensor, test: Tensor | None) -> None:
    if test is not None and len(test) and int(test.max()) > int(train.max()):
        raise UserError(f"the test set has label {int(test.max())}, but the training set ends at {int(train.max())}")


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, over evenly spaced images."""
    some = images[:: max(1, len(images) // _SAMPLED_FOR_STATISTICS)].double() / 255
    std, mean = torch.std_mean(some, dim=(0, 2, 3), correction=0)
    return tuple(mean.tolist()), tuple(std.clamp(min=1 / 255).tolist())


def _fingerprint(*sources: MemoryImages | ImageDataset | None) -> str:
    digest = hashlib.sha256()
    for source in sources:
        if source is not None:
            digest.update(f"{len(source)} samples".encode())
            digest.update(source.labels.numpy().tobytes())
            if isinstance(source, ImageDataset):
                digest.update(source.store.identity())
    return digest.hexdigest()
