"""What a packer makes of an image folder: the images of each part, in order. Imports no torch."""

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
from training.pack.split_writer import has_records

_PLAN = ".plan.json"
_CHANGES = {"size": "another --size", "images": "other images in SRC"}


@dataclass(frozen=True, kw_only=True)
class PackPlan:
    """A packed data set to be made."""

    source: Path
    size: int
    classes: tuple[str, ...]
    parts: dict[str, SplitIndex]
    """By name; the images' paths are below `source`."""

    @property
    def images(self) -> int:
        """Images in all parts."""
        return sum(len(part.names) for part in self.parts.values())

    def tables(self, name: str) -> dict[str, bytes]:
        """The contents of a part's files of labels and names."""
        part = self.parts[name]
        return {"labels": _npy(part.labels), "names": _npy(part.names)}

    @cached_property
    def identity(self) -> dict[str, str | int]:
        """Differs between plans whose files differ in more than pixels."""
        tables = {
            name: [hashlib.sha256(content).hexdigest() for content in self.tables(name).values()] for name in self.parts
        }
        return _identity(self.size, self.classes, tables)

    def check_resumable(self, directory: Path) -> None:
        """Write the plan, or make sure that the files in a directory were begun with it.

        Raises:
            UserError: they were begun with another plan.
        """
        path = directory / _PLAN
        try:
            begun = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            begun = {}
        if not has_records(directory):
            write_json(path, self.identity)
        elif begun != self.identity:
            changed = ", ".join(_CHANGES[name] for name in self.identity if begun.get(name) != self.identity[name])
            raise UserError(f"{directory} was begun with {changed}: use the same, or start over: rm -r '{directory}'")

    def matches(self, index: PackIndex) -> bool:
        """Whether a packed data set has this plan's images, labels and size."""
        tables = {part.name: [part.labels.sha256, part.names.sha256] for part in index.parts}
        return self.identity == _identity(index.size, index.classes, tables)


def _identity(size: int, classes: tuple[str, ...], tables: dict[str, list[str]]) -> dict[str, str | int]:
    return {"size": size, "images": hashlib.sha256(json.dumps([classes, tables]).encode()).hexdigest()}


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def make_plan(source: Path, size: int) -> PackPlan:
    """List the images.

    Raises:
        UserError: the source is no image folder, or a directory cannot be read.
    """
    layout = check_data(source)
    try:
        listing = build_index(layout)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be listed ({error.strerror}): restore or remove it") from error
    parts = {name: _below(layout, name, part) for name, part in listing.parts.items()}
    return PackPlan(source=source, size=size, classes=listing.classes, parts=parts)


def _below(layout: DataLayout, name: str, part: SplitIndex) -> SplitIndex:
    """The part with paths below the layout's directory."""
    root: Path = getattr(layout, name)
    prefix = "" if root == layout.path else f"{root.relative_to(layout.path)}/"
    return SplitIndex(names=np.char.add(prefix.encode(), part.names), labels=part.labels)
