"""The Python environment that `hpc` runs in: what is in it, and what a copy of it needs to work elsewhere.

Runs on the login node. A copy works because Python finds its environment from the place of its interpreter:
`pyvenv.cfg` above `bin/python`, or in a conda environment `lib/` beside `bin/`.
"""

import hashlib
import importlib.util
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from hpc.core.errors import UserError

# What the files of an archive look like: another number makes other archives of the same environment.
_FORMAT = 1
_VENV, _CONDA = "pyvenv.cfg", "conda-meta"
# A venv is often made in a project, or the project's directory itself is one: only what is Python's is packed.
_OF_A_VENV = frozenset({_VENV, "bin", "lib", "lib64", "include", "share", "etc"})
# Conda's base environment holds all others, and everything that was ever downloaded.
_NOT_OF_CONDA = frozenset({"envs", "pkgs"})
_BYTE_CODE = ".pyc"


class PackedFileEntry(NamedTuple):
    """One file or link of an environment."""

    name: str
    """Its path below the environment."""
    size: int
    modified_ns: int
    executable: bool
    target: str | None = None
    """Where it leads, if it is a link: relative inside the environment, else absolute."""

    @property
    def leaves(self) -> bool:
        """Whether it is a link out of the environment, which is made anew on each node."""
        return self.target is not None and self.target.startswith("/")


@dataclass(frozen=True, kw_only=True)
class PythonEnvironment:
    """A Python environment, and what of it a copy has to have."""

    prefix: Path
    python: str
    """The interpreter's path below it."""
    torch: str
    """The path below it that torch is imported from."""
    torch_version: str

    @cached_property
    def members(self) -> tuple[PackedFileEntry, ...]:
        """Everything in it, in the order of the names.

        Raises:
            OSError: something cannot be read.
        """
        return tuple(sorted(_walk(self.prefix, "", _top(self.prefix))))

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(member.size for member in self.members)

    @cached_property
    def fingerprint(self) -> str:
        """Names what is in it: another name, size, time of change or target of a link makes another one.

        Byte code does not count: Python writes it whenever it likes.
        """
        digest = hashlib.sha256(repr((_FORMAT, str(self.prefix), self.python)).encode())
        for member in self.members:
            if not member.name.endswith(_BYTE_CODE):
                digest.update(repr(tuple(member)).encode())
        return digest.hexdigest()[:16]


def this_environment() -> PythonEnvironment:
    """The environment that this process runs in.

    Raises:
        UserError: it is none that a copy could be made of, or torch is not in it.
    """
    prefix = Path(sys.prefix)
    if sys.prefix == sys.base_prefix and not (prefix / _CONDA).is_dir():
        raise UserError(
            f"--stage-env, but {sys.executable} is the system's Python and no environment of yours: make one "
            "(python -m venv, uv venv or conda create), install torchrelay there and submit with it, or leave the "
            "flag out"
        )
    spec = importlib.util.find_spec("torch")
    torch = Path(spec.origin) if spec is not None and spec.origin else None
    if torch is None or not torch.is_relative_to(prefix):
        raise UserError(
            f"--stage-env, but torch is not in {prefix}{f', it is {torch.parent}' if torch else ''}: a copy of the "
            "environment would not make its import faster. Install torch in it, or leave the flag out"
        )
    executable = Path(sys.executable)
    return PythonEnvironment(
        prefix=prefix,
        python=str(executable.relative_to(prefix)) if executable.is_relative_to(prefix) else "bin/python",
        torch=str(torch.relative_to(prefix)),
        torch_version=metadata.version("torch"),
    )


def _top(prefix: Path) -> list[str]:
    """The names at the top that belong to the environment."""
    names = frozenset(os.listdir(prefix))  # noqa: PTH208 - names are what is wanted
    return sorted(names & _OF_A_VENV if _VENV in names else names - _NOT_OF_CONDA)


def _walk(prefix: Path, directory: str, names: list[str] | None = None) -> Iterator[PackedFileEntry]:
    with os.scandir(prefix / directory) as entries:
        found = sorted((entry for entry in entries if names is None or entry.name in names), key=lambda e: e.name)
    for entry in found:
        name = os.path.join(directory, entry.name)  # noqa: PTH118 - tens of thousands of them
        if entry.is_symlink():
            yield _link(prefix, name, entry)
        elif entry.is_dir():
            yield from _walk(prefix, name)
        elif entry.is_file():
            yield _file(name, entry.stat())


def _file(name: str, status: os.stat_result) -> PackedFileEntry:
    return PackedFileEntry(name, status.st_size, status.st_mtime_ns, bool(status.st_mode & stat.S_IXUSR))


def _link(prefix: Path, name: str, entry: "os.DirEntry[str]") -> PackedFileEntry:
    """A link as it is to be made elsewhere; one to a file of a package is that file.

    uv can link every file of a package into its cache: a copy of such links would be none.
    """
    status = entry.stat(follow_symlinks=False)
    target = _inside(prefix, name)
    if target is None and entry.is_file() and not name.startswith("bin/"):
        return _file(name, entry.stat())
    away = os.path.normpath(prefix / Path(name).parent / os.readlink(entry.path))  # noqa: PTH115
    return PackedFileEntry(name, 0, status.st_mtime_ns, executable=False, target=target or away)


def _inside(prefix: Path, name: str) -> str | None:
    """Where a link leads, seen from its directory; None if it leaves the environment."""
    directory = prefix / Path(name).parent
    target = os.path.normpath(directory / os.readlink(prefix / name))  # noqa: PTH115
    for top in (prefix, prefix.resolve()):
        if Path(target).is_relative_to(top):
            return os.path.relpath(prefix / Path(target).relative_to(top), directory)
    return None
