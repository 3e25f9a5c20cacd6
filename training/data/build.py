"""Opens a data set of any layout: reads or lists it, holds out a part for validation, sets up the augmentation.

Runs on every rank.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hpc.core.errors import UserError
from training.config.dataset_layout import DataLayout
from training.config.packed_index import read_index
from training.config.train_config import TrainConfig
from training.data.cifar import read_cifar, read_cifar_names
from training.data.dataset import Data, MemoryImages
from training.data.file_index import SplitIndex, build_index, deserialize
from training.data.idx import class_names, read_idx_pair
from training.data.image_dataset import ImageDataset
from training.data.image_folder import FolderImages
from training.data.packed import open_part
from training.data.transforms.augment import Augmentation, memory_augmentation, photo_augmentation
from training.runtime.counter_rng import Purpose, derive_key, permutation

# ImageNet's, which suit photographs.
_PHOTO_MEAN, _PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SAMPLED_FOR_STATISTICS = 5000

_Pair = tuple[Tensor, Tensor]


def load_data(config: TrainConfig, layout: DataLayout, folder_size: int, listing: bytes = b"") -> Data:
    """Open the data. Without a validation set of their own, a part of the training set is held out, chosen by seed.

    Args:
        config: says how much to hold out, and how to augment.
        layout: where the data are.
        folder_size: side in pixels that photographs are scaled to; in evaluations to --eval-image-size, if given.
        listing: the images of a folder, as rank 0's `load_or_build_index` gave them; empty: they are listed here.

    Raises:
        UserError: files are missing, torn, or do not fit together.
    """
    if layout.kind == "image-folder":
        return _load_folder(config, layout, folder_size, listing)
    if layout.kind == "packed":
        return _load_packed(config, layout, folder_size)
    if layout.kind == "idx":
        train = read_idx_pair(layout.train, "train")
        test = read_idx_pair(layout.test, "test") if layout.test else None
        return _in_memory(config, layout, train, test, class_names(train[1], int(train[1].max()) + 1))
    names = read_cifar_names(layout.path, layout.kind)
    parts = [read_cifar(layout.path, layout.kind, part, len(names)) for part in ("train", "test")]
    return _in_memory(config, layout, parts[0], parts[1], names)


def _in_memory(
    config: TrainConfig, layout: DataLayout, everything: _Pair, tested: _Pair | None, classes: tuple[str, ...]
) -> Data:
    images, labels = everything
    _check_labels(labels, tested[1] if tested else None)
    mean, std = _statistics(images)
    channels, height, width = images.shape[1:]
    held, kept = _hold_out(config, len(labels))
    augmentation = memory_augmentation(config, layout.kind, (channels, height, width), mean)
    train = MemoryImages(images=images[kept], labels=labels[kept], title="the training set", augmentation=augmentation)
    val = MemoryImages(images=images[held], labels=labels[held], title="the validation set")
    test = MemoryImages(images=tested[0], labels=tested[1], title="the test set") if tested else None
    return Data(
        train=train,
        val=val if len(held) else None,
        test=test,
        classes=classes,
        mean=mean,
        std=std,
        channels=channels,
        shape=(height, width),
        in_memory=True,
        cheap=isinstance(augmentation, Augmentation) and augmentation.transform is None,
        fingerprint=_fingerprint(train, test),
    )


def _load_folder(config: TrainConfig, layout: DataLayout, size: int, listing: bytes) -> Data:
    listed = deserialize(listing) if listing else build_index(layout)
    val, test = (
        _folder(root, listed.parts[name], size) if root else None
        for name, root in (("val", layout.val), ("test", layout.test))
    )
    return _photos(config, _folder(layout.train, listed.parts["train"], size), val, test, listed.classes)


def _load_packed(config: TrainConfig, layout: DataLayout, size: int) -> Data:
    index = read_index(layout.path)
    parts = {
        part.name: ImageDataset(album=album, labels=labels, size=size)
        for part in index.parts
        for album, labels in [open_part(layout.path, index, part)]
    }
    return _photos(config, parts["train"], parts.get("val"), parts.get("test"), index.classes)


def _photos(
    config: TrainConfig,
    train: ImageDataset,
    val: ImageDataset | None,
    test: ImageDataset | None,
    classes: tuple[str, ...],
) -> Data:
    if val is None:
        held, kept = _hold_out(config, len(train))
        val, train = train.part(held) if len(held) else None, train.part(kept)
    val, test = (part and replace(part, size=config.eval_image_size or part.size) for part in (val, test))
    return Data(
        train=replace(train, augmentation=photo_augmentation(config, train.size, _PHOTO_MEAN)),
        val=val,
        test=test,
        classes=classes,
        mean=_PHOTO_MEAN,
        std=_PHOTO_STD,
        channels=3,
        shape=(train.size, train.size),
        in_memory=False,
        cheap=False,
        fingerprint=_fingerprint(train, val, test),
    )


def _folder(root: Path, part: SplitIndex, size: int) -> ImageDataset:
    album = FolderImages(root=root, names=part.names)
    return ImageDataset(album=album, labels=torch.from_numpy(part.labels), size=size)


def _hold_out(config: TrainConfig, samples: int) -> tuple[Tensor, Tensor]:
    """Indices to hold out and to train on, each sorted."""
    order = permutation(derive_key(config.seed, Purpose.HOLD_OUT), samples)
    held = round(samples * config.val_split)
    if held == samples:
        raise UserError(f"--val-split is {config.val_split}, which leaves nothing of {samples} to train on")
    return order[:held].sort().values, order[held:].sort().values


def _check_labels(train: Tensor, test: Tensor | None) -> None:
    if test is not None and len(test) and int(test.max()) > int(train.max()):
        raise UserError(f"the test set has label {int(test.max())}, but the training set ends at {int(train.max())}")


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of evenly spread images: whole numbers are summed, so exact."""
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
                digest.update(source.album.identity())
    return digest.hexdigest()
