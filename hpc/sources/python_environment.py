"""The Python environment that `--stage-env` packs: its files, and the description that travels in the archive.

`hpc submit` lists and packs it on the login node; compute nodes read the description. A copy works because Python finds
its environment relative to its interpreter: `pyvenv.cfg` above `bin/python`, or conda's `lib/` beside `bin/`.
"""

import hashlib
import importlib.util
import json
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

from hpc.base.errors import TorchrelayError, UserError

# Version of the archives' format. With a new number, even unchanged environments are packed again.
_FORMAT = 3
DESCRIPTION = "torchrelay-environment.json"
_VENV, _CONDA = "pyvenv.cfg", "conda-meta"
# A project's directory may itself be the venv: only Python's own directories are packed.
_VENV_NAMES = frozenset({_VENV, "bin", "lib", "lib64", "include", "share", "etc"})
# Conda's base environment contains all other environments, and every downloaded package.
_CONDA_EXCLUDED = frozenset({"envs", "pkgs"})


class PackedFileEntry(NamedTuple):
    """One file or symlink of an environment."""

    name: str
    """Path relative to the environment."""
    size: int
    modified_ns: int
    executable: bool
    target: str | None = None
    """The target of a symlink, relative if it is inside the environment, else absolute; None for a file."""


@dataclass(frozen=True, kw_only=True)
class PythonEnvironment:
    """A Python environment that `hpc submit` can pack."""

    prefix: Path
    python: str
    """Path of the interpreter, relative to `prefix`."""

    @cached_property
    def members(self) -> tuple[PackedFileEntry, ...]:
        """The files and symlinks to pack, sorted by name. Raises OSError if one cannot be read."""
        names = frozenset(os.listdir(self.prefix))  # noqa: PTH208 - names, not paths
        return tuple(sorted(_walk(self.prefix, "", names & _VENV_NAMES if _VENV in names else names - _CONDA_EXCLUDED)))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of names, sizes, times and symlink targets. Omits byte code: Python may write it at any time."""
        digest = hashlib.sha256(repr((_FORMAT, str(self.prefix), self.python)).encode())
        for member in self.members:
            if not member.name.endswith(".pyc"):
                digest.update(repr(tuple(member)).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class EnvironmentDescription:
    """What a node needs to use its copy of a Python environment. The archive has it in the file `DESCRIPTION`."""

    python: str
    links: dict[str, str]
    """Targets of the symlinks that lead out of the environment, by the links' names. Unpacking refuses such links, so
    each node makes them itself."""

    @classmethod
    def load(cls, unpacked: Path) -> Self:
        """Read the description in an unpacked archive. Raises TorchrelayError if it is missing or malformed."""
        try:
            return cls(**json.loads((unpacked / DESCRIPTION).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise TorchrelayError(f"{unpacked} is not an environment of torchrelay ({error}): submit again") from error


def this_environment() -> PythonEnvironment:
    """Return the environment of this process. Raises UserError if it is the system's Python, or if it has no torch."""
    prefix = Path(sys.prefix)
    if sys.prefix == sys.base_prefix and not (prefix / _CONDA).is_dir():
        raise UserError(
            f"--stage-env needs an environment of your own, and {sys.executable} is the system's Python: create one "
            "(python -m venv, uv venv or conda create), install torchrelay there and submit with it, or omit the flag"
        )
    spec = importlib.util.find_spec("torch")
    torch = Path(spec.origin) if spec is not None and spec.origin else None
    if torch is None or not torch.is_relative_to(prefix):
        raise UserError(
            f"--stage-env needs torch in the environment, but torch is not in {prefix}"
            f"{f' (it is {torch.parent})' if torch else ''}: install it there, or omit the flag"
        )
    executable = Path(sys.executable)
    python = str(executable.relative_to(prefix)) if executable.is_relative_to(prefix) else "bin/python"
    return PythonEnvironment(prefix=prefix, python=python)


def _walk(prefix: Path, directory: str, names: frozenset[str] | None = None) -> Iterator[PackedFileEntry]:
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
    """Return the entry of a symlink. If it leads from a package to a file outside, pack that file instead.

    uv can link every file of a package into its cache: copies of such links would break without the cache.
    """
    directory = prefix / Path(name).parent
    target = os.path.normpath(directory / os.readlink(entry.path))  # noqa: PTH115
    top = next((top for top in (prefix, prefix.resolve()) if Path(target).is_relative_to(top)), None)
    if top is not None:
        target = os.path.relpath(prefix / Path(target).relative_to(top), directory)
    elif entry.is_file() and not name.startswith("bin/"):
        return _file(name, entry.stat())
    modified_ns = entry.stat(follow_symlinks=False).st_mtime_ns
    return PackedFileEntry(name, 0, modified_ns, executable=False, target=target)
