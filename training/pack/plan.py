"""What a packer is to make of an image folder: which image goes to which place of which file. Imports no torch."""

import hashlib
import io
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hpc.core.errors import UserError
from hpc.core.files import write_json
from training.config.dataset_layout import DataLayout, check_data
from training.config.packed_index import PackIndex
from training.data.file_index import SplitIndex, build_index
from training.pack.shard_writer import CHANNELS, Shard

_PLAN = ".plan.json"


@dataclass(frozen=True, kw_only=True)
class PackPlan:
    """A packed data set to be made."""

    source: Path
    size: int
    shard_images: int
    """Images in every shard but the last of a part."""
    classes: tuple[str, ...]
    parts: dict[str, SplitIndex]
    """By name; the images' paths are below `source`."""

    @property
    def images(self) -> int:
        """In all parts together."""
        return sum(len(part.names) for part in self.parts.values())

    def shards(self, directory: Path) -> list[Shard]:
        """All shards, to be made in a directory."""
        return [shard for name in self.parts for shard in self.shards_of(name, directory)]

    def shards_of(self, name: str, directory: Path) -> list[Shard]:
        """The shards of a part."""
        paths, step = self.parts[name].names, self.shard_images
        return [
            Shard(
                directory=directory,
                name=f"{name}-{first // step:05d}.npy",
                source=self.source,
                paths=paths[first : first + step],
                first=first,
                size=self.size,
            )
            for first in range(0, len(paths), step)
        ]

    def tables(self, name: str) -> dict[str, bytes]:
        """The files of a part's labels and names, by what they hold."""
        part = self.parts[name]
        return {"labels": _npy(part.labels), "names": _npy(part.names)}

    @cached_property
    def state(self) -> dict[str, str | int]:
        """Tells whether files were made for this plan."""
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        for name in self.parts:
            for content in (name.encode(), *self.tables(name).values()):
                digest.update(hashlib.sha256(content).digest())
        return {"size": self.size, "shard_images": self.shard_images, "images": digest.hexdigest()}

    def settle(self, directory: Path) -> None:
        """Write the plan down, or make sure that it is the one by which the files in a directory were begun.

        Raises:
            UserError: it is not.
        """
        path = directory / _PLAN
        try:
            begun = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            begun = {}
        if not any(directory.glob("*.npy")):
            write_json(path, self.state)
        elif begun != self.state:
            changed = ", ".join(_CHANGES[name] for name in self.state if begun.get(name) != self.state[name])
            raise UserError(f"{directory} was begun with {changed}: use the same, or start anew: rm -r '{directory}'")


_CHANGES = {"size": "another --size", "shard_images": "another --shard-mb", "images": "other images in SRC"}


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def make_plan(source: Path, size: int, shard_bytes: int) -> PackPlan:
    """List the images and spread them over shards.

    Raises:
        UserError: the source is no image folder, or a directory cannot be read.
    """
    layout = check_data(source)
    try:
        listing = build_index(layout)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be listed ({error.strerror}): restore or remove it") from error
    return PackPlan(
        source=source,
        size=size,
        shard_images=max(1, shard_bytes // (size**2 * CHANNELS)),
        classes=listing.classes,
        parts={name: _below(layout, name, part) for name, part in listing.parts.items()},
    )


def _below(layout: DataLayout, name: str, part: SplitIndex) -> SplitIndex:
    root: Path = getattr(layout, name)
    prefix = "" if root == layout.path else f"{root.relative_to(layout.path)}/"
    return SplitIndex(names=np.char.add(prefix.encode(), part.names), labels=part.labels)


def same_content(index: PackIndex, plan: PackPlan) -> bool:
    """Whether a packed data set is what the plan asks for, as far as names tell."""
    planned = {
        name: [hashlib.sha256(content).hexdigest() for content in plan.tables(name).values()] for name in plan.parts
    }
    packed = {part.name: [part.labels.sha256, part.names.sha256] for part in index.parts}
    same = (index.size, index.shard_images, index.classes) == (plan.size, plan.shard_images, plan.classes)
    return same and planned == packed
