"""The list of the images of a folder: made by rank 0, kept in the run directory, handed to the other ranks as bytes.

Listing a million files takes a shared file system minutes; to see that no class directory has changed since takes one
look at each. A directory changes when a name in it is added, removed or renamed, not when a file gets another content.
"""

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpc.core.errors import UserError
from hpc.core.files import write_atomic
from training.config.dataset_layout import DataLayout, is_class_directory, is_image

# A change within the same tick of a file system's clock as the last look would not be seen; some tick in seconds.
_TICK_NS = 2 * 10**9
_FORMAT = b"listing 1"


@dataclass(frozen=True, kw_only=True)
class SplitIndex:
    """The images below one directory of class directories."""

    names: np.ndarray
    """Paths below the directory as bytes [n]: one array, for workers that touch a list of strings copy its pages."""
    labels: np.ndarray
    """int64 [n]"""


@dataclass(frozen=True, kw_only=True)
class FileIndex:
    """All images of a folder."""

    classes: tuple[str, ...]
    """The names of the class directories of the training set, sorted: a class's number is its place."""
    parts: dict[str, SplitIndex]
    """`train`, and `val` and `test` if there are such."""


_PARTS = "train", "val", "test"  # fields of DataLayout


def load_or_build_index(layout: DataLayout, kept: Path, now_ns: int) -> bytes:
    """The packed list of the images, from the file `kept` if the class directories have not changed since.

    Args:
        layout: of an image folder.
        kept: is replaced if it is outdated, torn, or something else.
        now_ns: the time, in nanoseconds since 1970.

    Raises:
        UserError: as `build_index`, or a directory cannot be read.
    """
    try:
        state, changed_ns = _state(layout)
        known = _read(kept, state)
        if known is not None:
            return known
        content = serialize(build_index(layout), state)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be listed ({error.strerror}): restore or remove it") from error
    if changed_ns < now_ns - _TICK_NS:
        _write(kept, content)
    return content


def _state(layout: DataLayout) -> tuple[str, int]:
    """A digest of the class directories and their times of change, and the last of these times in nanoseconds.

    The time of modification can be set, as copying with rsync does; the time of the inode's change cannot.
    """
    digest, newest = hashlib.sha256(_FORMAT), 0
    for part, root in _roots(layout).items():
        for name in _classes(root):
            status = (root / name).stat()
            times = (status.st_mtime_ns, status.st_ctime_ns)
            digest.update(b"%s\0%s\0%d %d\0" % (part.encode(), os.fsencode(root / name), *times))
            newest = max(newest, *times)
    return digest.hexdigest(), newest


def _read(kept: Path, state: str) -> bytes | None:
    """The file's content if it is whole and belongs to this state."""
    try:
        content = kept.read_bytes()
        return content if _arrays(content)["state"].item() == state else None
    except Exception:  # noqa: BLE001  # whatever numpy says to a torn or foreign file: the images are listed anew
        return None


def _write(kept: Path, content: bytes) -> None:
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(kept, content)
    except OSError as error:
        print(f"warning: {kept} cannot be written ({error}): the next attempt lists the images again", flush=True)


def serialize(listing: FileIndex, state: str = "") -> bytes:
    """A listing as bytes: a NumPy archive without pickles."""
    arrays = {"state": np.array(state), "classes": np.array([os.fsencode(name) for name in listing.classes])}
    for name, part in listing.parts.items():
        arrays |= {f"{name} names": part.names, f"{name} labels": part.labels}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def deserialize(content: bytes) -> FileIndex:
    """What `serialize` wrote."""
    arrays = _arrays(content)
    present = (name for name in _PARTS if f"{name} names" in arrays)
    parts = {name: SplitIndex(names=arrays[f"{name} names"], labels=arrays[f"{name} labels"]) for name in present}
    return FileIndex(classes=tuple(os.fsdecode(name) for name in arrays["classes"].tolist()), parts=parts)


def _arrays(content: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return dict(file)


def build_index(layout: DataLayout) -> FileIndex:
    """Look at every name in an image folder.

    Raises:
        UserError: a directory of val/ or test/ is not a class of the training set.
    """
    classes = _classes(layout.train)
    return FileIndex(
        classes=tuple(classes), parts={name: _list_part(root, classes) for name, root in _roots(layout).items()}
    )


def _list_part(root: Path, classes: list[str]) -> SplitIndex:
    unknown = sorted(set(_classes(root)) - set(classes))
    if unknown:
        raise UserError(f"{root / unknown[0]} is a class that the training set does not have: remove it or add it")
    found = [_images_in(root / name) for name in classes]
    names = [os.fsencode(f"{name}/{image}") for name, images in zip(classes, found, strict=True) for image in images]
    labels = np.repeat(np.arange(len(classes)), [len(images) for images in found])
    return SplitIndex(names=np.array(names, dtype=np.bytes_), labels=labels)


def _roots(layout: DataLayout) -> dict[str, Path]:
    return {name: root for name in _PARTS if (root := getattr(layout, name)) is not None}


def _classes(root: Path) -> list[str]:
    """The names of the class directories, sorted."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if is_class_directory(entry))


def _images_in(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if is_image(entry.name))
