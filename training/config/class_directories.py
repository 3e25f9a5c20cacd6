"""Finds the images of class directories by their names, as torchvision's ImageFolder does.

Runs on the login node, on ranks and in packers; imports neither torch nor NumPy.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
# What file managers, file servers and file systems leave in directories and archives, in lower case. Other such names
# begin with a dot: .DS_Store, ._photo.jpg, .Trash-1000, .snapshot, .ipynb_checkpoints.
_NO_DATA = frozenset({
    *("__macosx", "icon\r", "network trash folder", "temporary items"),  # macOS
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "recycler", "system volume information"),  # Windows
    *("@eadir", "@recycle", "#recycle", "@tmp", "@__thumb", "#snapshot", "~snapshot", "@sharebin"),  # file servers
    *("lost+found", "lost.dir", "found.000"),  # repaired file systems
})  # fmt: skip


def is_ignored(name: str) -> bool:
    """Return whether a file or directory is no data, by its name: it is hidden, or a program has left it."""
    return name.startswith(".") or name.lower() in _NO_DATA


def is_image(name: str) -> bool:
    """Return whether a file's name has the suffix of an image and is not ignored."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not is_ignored(name)


def class_names(root: Path) -> list[str]:
    """Return the sorted names of the class directories in `root`."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if not is_ignored(entry.name) and entry.is_dir())


def holds_image(directory: str, *, below: bool = False) -> bool:
    """Return whether an image is in a directory or, if `below`, in it or in a directory below it.

    The search stops at the first image, so it is quick for huge directories.
    """
    inside = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file() and is_image(entry.name):
                return True
            if below and not is_ignored(entry.name) and entry.is_dir():
                inside.append(entry.path)
    return any(holds_image(path, below=True) for path in inside)


@dataclass(frozen=True, kw_only=True)
class ListedDirectory:
    """A directory and the images in it."""

    path: str
    """Path below the directory from which the search began."""
    status: os.stat_result
    """The directory's status before it was listed."""
    images: tuple[str, ...]
    """Sorted names of the images in it."""


def list_images(root: Path, directory: str) -> Iterator[ListedDirectory]:
    """Yield a directory below `root`, and all directories below it, sorted by name."""
    status = (root / directory).stat()
    images = []
    inside = []
    with os.scandir(root / directory) as entries:
        for entry in entries:
            # To ask whether a link leads to a file would take a call for each of, perhaps, a million links.
            if is_image(entry.name) and not entry.is_dir(follow_symlinks=False):
                images.append(entry.name)
            elif not is_ignored(entry.name) and entry.is_dir():
                inside.append(entry.name)
    yield ListedDirectory(path=directory, status=status, images=tuple(sorted(images)))
    for name in sorted(inside):
        yield from list_images(root, f"{directory}/{name}")
