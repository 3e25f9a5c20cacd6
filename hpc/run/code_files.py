"""The record of what `hpc submit` put into a run's `code/`, and what the run has written there since. Runs everywhere.

A link in `code/` leads to the user's own files. Nothing here follows one.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from hpc.base.files import write_json

OUR_DIRECTORY = ".torchrelay"
"""The directory in a run's `code/` that is not the user's: our packages, and the record."""
_RECORD = Path(OUR_DIRECTORY, "files.json")


@dataclass(frozen=True, kw_only=True)
class CodeFiles:
    """The files and links that a run's `code/` had at the start, by their paths relative to it."""

    root: str
    """The directory of which `code/` is the image."""
    top: str = "."
    """The top of the user's repository, or else the working directory, relative to `root`."""
    copied: Mapping[str, tuple[int, int]]
    """The size in bytes and the modification time in nanoseconds of each copied file or link."""
    linked: tuple[str, ...]
    """What is a link to the original."""

    @classmethod
    def load(cls, code: Path) -> Self | None:
        """Read the record in a `code/`; None if it is damaged, or if nothing of the user's directory was copied.

        Without it, nothing of the run is taken for a copy, so nothing is lost.
        """
        try:
            fields = json.loads((code / _RECORD).read_bytes())
            copied = {name: (size, time) for name, (size, time) in fields["copied"].items()}
            return cls(**{**fields, "copied": copied, "linked": tuple(fields["linked"])})
        except (AttributeError, LookupError, OSError, TypeError, ValueError):
            return None

    def save(self, code: Path) -> None:
        """Write the record into a `code/`."""
        (code / _RECORD).parent.mkdir(exist_ok=True)
        write_json(code / _RECORD, asdict(self))


def parents(names: Iterable[str]) -> set[str]:
    """Return the directories above relative paths, without the root."""
    directories = set[str]()
    for name in names:
        parent = os.path.dirname(name)  # noqa: PTH120 - there are thousands of names
        while parent and parent not in directories:
            directories.add(parent)
            parent = os.path.dirname(parent)  # noqa: PTH120
    return directories


def stamp(path: Path) -> tuple[int, int]:
    """Return the size and the modification time of a file, or of a link itself, as in `CodeFiles.copied`."""
    status = path.lstat()
    return status.st_size, status.st_mtime_ns


def written_files(code: Path, record: CodeFiles | None) -> Iterator[str]:
    """Yield what a run has created or changed in its `code/`: files, links, and empty directories with a final slash.

    Byte code does not count. Without a record, yield all that is there.
    """
    copied, linked = (record.copied, frozenset(record.linked)) if record else ({}, frozenset())
    made = parents((*copied, *linked))
    for directory, names, files in os.walk(code):
        below = os.path.relpath(directory, code)
        if below == ".":
            names[:] = [name for name in names if name != OUR_DIRECTORY]
            below = ""
        names[:] = [name for name in names if name != "__pycache__"]
        links = [name for name in names if os.path.islink(os.path.join(directory, name))]  # noqa: PTH114, PTH118
        for name in (*files, *links):
            path = os.path.join(below, name)  # noqa: PTH118
            entry = Path(directory, name)
            is_ours = entry.is_symlink() if path in linked else path in copied and stamp(entry) == copied[path]
            if not is_ours:
                yield path
        if below and not names and not files and below not in made:
            yield f"{below}/"
