"""Lists the files of an image folder. Runs on rank 0, which caches the list and sends it to all ranks, and in packers.

To list a million files on a shared file system takes minutes. The cache is valid while no class directory has changed,
which takes one `stat` per directory to check. A directory changes when a name in it is added, removed or renamed, but
not when the content of a file changes. Imports no torch.
"""

import hashlib
import io
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpc.base.errors import UserError
from hpc.base.files import write_atomic
from training.config.dataset_layout import DataLayout, is_class_directory, is_image

# Two changes within one tick of a file system's clock get the same time, and some clocks tick in seconds. So an index
# is cached only if its directories have been unchanged for more than a tick.
_TICK_NS = 2 * 10**9
_FORMAT = b"file index 1"
_PARTS = "train", "val", "test"  # fields of DataLayout


@dataclass(frozen=True, kw_only=True)
class SplitIndex:
    """The images of a part of the data, such as the training set."""

    names: np.ndarray
    """Paths below the part's directory, bytes [n]. An array, since loader workers would copy the pages of a list."""
    labels: np.ndarray
    """Labels, int64 [n]."""


@dataclass(frozen=True, kw_only=True)
class FileIndex:
    """All images of a folder."""

    classes: tuple[str, ...]
    """Sorted names of the training set's class directories. The number of a class is its position."""
    parts: dict[str, SplitIndex]


def load_or_build_index(layout: DataLayout, cache: Path, now_ns: int) -> bytes:
    """Return the serialized index, from the file `cache` if no class directory has changed.

    Otherwise the index is built, and the file replaced. `now_ns` is the time in nanoseconds since 1970.

    Raises:
        UserError: a directory cannot be read, or val/ or test/ has a class that the training set lacks.
    """
    try:
        fingerprint, changed_ns = _fingerprint(layout)
        # NumPy may raise any error for a damaged file. The index is then built again.
        with suppress(Exception):
            cached = cache.read_bytes()
            if _arrays(cached)["fingerprint"].item() == fingerprint:
                return cached
        content = serialize(build_index(layout), fingerprint)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be listed ({error.strerror}): restore or remove it") from error
    if changed_ns < now_ns - _TICK_NS:
        try:
            cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(cache, content)
        except OSError as error:
            print(f"warning: {cache} cannot be written ({error}): the next attempt lists the images again", flush=True)
    return content


def _fingerprint(layout: DataLayout) -> tuple[str, int]:
    """Return a digest of the class directories and their times, and the latest of these times in nanoseconds.

    The inode's change time is included, because programs such as rsync set the modification time.
    """
    digest, newest = hashlib.sha256(_FORMAT), 0
    for part, root in image_roots(layout).items():
        for name in _classes(root):
            status = (root / name).stat()
            times = (status.st_mtime_ns, status.st_ctime_ns)
            digest.update(b"%s\0%s\0%d %d\0" % (part.encode(), os.fsencode(root / name), *times))
            newest = max(newest, *times)
    return digest.hexdigest(), newest


def serialize(index: FileIndex, fingerprint: str = "") -> bytes:
    """Return the index as the bytes of a NumPy archive without pickles."""
    arrays = {"fingerprint": np.array(fingerprint), "classes": np.array([os.fsencode(name) for name in index.classes])}
    for name, part in index.parts.items():
        arrays |= {f"{name} names": part.names, f"{name} labels": part.labels}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def deserialize(content: bytes) -> FileIndex:
    """Return the index from which `serialize` made `content`."""
    arrays = _arrays(content)
    present = (name for name in _PARTS if f"{name} names" in arrays)
    parts = {name: SplitIndex(names=arrays[f"{name} names"], labels=arrays[f"{name} labels"]) for name in present}
    return FileIndex(classes=tuple(os.fsdecode(name) for name in arrays["classes"].tolist()), parts=parts)


def _arrays(content: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return dict(file)


def build_index(layout: DataLayout) -> FileIndex:
    """List every image of an image folder.

    Raises:
        UserError: a directory of val/ or test/ is not a class of the training set.
    """
    classes, parts = _classes(layout.train), {}
    for part, root in image_roots(layout).items():
        unknown = sorted(set(_classes(root)) - set(classes))
        if unknown:
            raise UserError(f"{root / unknown[0]} is a class that the training set does not have: remove it or add it")
        names, counts = list[bytes](), []
        for name in classes:
            images = _images_in(root / name)
            names += [os.fsencode(f"{name}/{image}") for image in images]
            counts.append(len(images))
        labels = np.repeat(np.arange(len(classes)), counts)
        parts[part] = SplitIndex(names=np.array(names, dtype=np.bytes_), labels=labels)
    return FileIndex(classes=tuple(classes), parts=parts)


def image_roots(layout: DataLayout) -> dict[str, Path]:
    """Return the directory with the class directories of each part of the data, by the part's name."""
    return {name: root for name in _PARTS if (root := getattr(layout, name)) is not None}


def _classes(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if is_class_directory(entry))


def _images_in(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if is_image(entry.name))
