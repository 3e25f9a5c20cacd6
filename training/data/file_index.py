"""Lists the files of an image folder. Runs on rank 0, which caches the list and sends it to all ranks, and in packers.

To list a million files on a shared file system takes minutes. The cache is valid while no directory has changed, which
takes one `stat` per directory to check. A directory changes when a name in it is added, removed or renamed, but not
when the content of a file changes. Imports no torch.
"""

import io
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpc.base.errors import UserError
from hpc.base.files import write_atomic
from hpc.base.text import file_name
from training.config.dataset_layout import (
    DataLayout,
    class_names,
    image_roots,
    is_ignored,
    is_image,
    known_classes,
)

# Two changes within one tick of a file system's clock get the same time, and some clocks tick in seconds. So an index
# is cached only if its directories have been unchanged for more than a tick.
_TICK_NS = 2 * 10**9


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
    """Names of the training set's class directories, sorted. The number of a class is its position."""
    parts: dict[str, SplitIndex]
    directories: np.ndarray
    """Paths of all directories that were listed, bytes [m], those of the parts first."""
    times_ns: np.ndarray
    """Modification and change time of each directory before it was listed, int64 [m, 2].

    The inode's change time is included, because programs such as rsync set the modification time.
    """


def load_or_build_index(layout: DataLayout, cache: Path, now_ns: int) -> bytes:
    """Return the serialized index, from the file `cache` if no directory has changed.

    Otherwise the index is built, and the file replaced. `now_ns` is the time in nanoseconds since 1970. Raises
    UserError if a directory cannot be read, or val/ or test/ has a class that the training set lacks.
    """
    # NumPy may raise any error for a damaged file. The index is then built again.
    with suppress(Exception):
        cached = cache.read_bytes()
        if _is_valid(deserialize(cached), layout):
            return cached
    try:
        index = build_index(layout)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be listed ({error.strerror}): restore or remove it") from error
    content = serialize(index)
    if index.times_ns.max() < now_ns - _TICK_NS:
        try:
            cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(cache, content)
        except OSError as error:
            print(f"warning: {cache} cannot be written ({error}): the next attempt lists the images again", flush=True)
    return content


def _is_valid(index: FileIndex, layout: DataLayout) -> bool:
    roots = image_roots(layout)
    directories = [Path(os.fsdecode(path)) for path in index.directories.tolist()]
    return (
        index.parts.keys() == roots.keys()
        and directories[: len(roots)] == list(roots.values())
        and index.times_ns.tolist() == [_times(directory.stat()) for directory in directories]
    )


def _times(status: os.stat_result) -> list[int]:
    return [status.st_mtime_ns, status.st_ctime_ns]


def serialize(index: FileIndex) -> bytes:
    """Return the index as the bytes of a NumPy archive without pickles."""
    arrays = {
        "classes": np.array([name.encode() for name in index.classes]),
        "directories": index.directories,
        "times": index.times_ns,
    }
    for name, part in index.parts.items():
        arrays |= {f"{name} names": part.names, f"{name} labels": part.labels}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def deserialize(content: bytes) -> FileIndex:
    """Return the index from which `serialize` made `content`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = dict(file)
    present = [name.removesuffix(" names") for name in arrays if name.endswith(" names")]
    return FileIndex(
        classes=tuple(name.decode() for name in arrays["classes"].tolist()),
        parts={name: SplitIndex(names=arrays[f"{name} names"], labels=arrays[f"{name} labels"]) for name in present},
        directories=arrays["directories"],
        times_ns=arrays["times"],
    )


def _list_images(root: Path, directory: str) -> Iterator[tuple[str, list[int], list[str]]]:
    """Yield a directory below `root`, and all below it, sorted by name: its path, times and sorted images."""
    times = _times((root / directory).stat())
    images = []
    inside = []
    with os.scandir(root / directory) as entries:
        for entry in entries:
            # To ask whether a link leads to a file would take a call for each of, perhaps, a million links.
            if is_image(entry.name) and not entry.is_dir(follow_symlinks=False):
                images.append(entry.name)
            elif not is_ignored(entry.name) and entry.is_dir():
                inside.append(entry.name)
    yield directory, times, sorted(images)
    for name in sorted(inside):
        yield from _list_images(root, f"{directory}/{name}")


def build_index(layout: DataLayout) -> FileIndex:
    """List every image of an image folder. Raises UserError if val/ or test/ has a class that train/ lacks."""
    roots = image_roots(layout)
    listed = [(str(root), _times(root.stat())) for root in roots.values()]
    classes, parts = class_names(layout.train), {}
    for part, root in roots.items():
        present = known_classes(layout, root)
        names, counts = list[bytes](), []
        for name in classes:
            before = len(names)
            for directory, times, images in _list_images(root, name) if name in present else ():
                listed.append((f"{root}/{directory}", times))
                names += [os.fsencode(f"{directory}/{image}") for image in images]
            counts.append(len(names) - before)
        labels = np.repeat(np.arange(len(classes)), counts)
        parts[part] = SplitIndex(names=np.array(names, dtype=np.bytes_), labels=labels)
    return FileIndex(
        classes=tuple(map(file_name, classes)),
        parts=parts,
        directories=np.array([os.fsencode(path) for path, _ in listed]),
        times_ns=np.array([times for _, times in listed]),
    )
