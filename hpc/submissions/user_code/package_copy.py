"""Copies our packages into a run, so that an upgrade does not change a run that waits or resumes. Login node.

The copy is one archive, from which Python imports: hundreds of files for each run would use up a quota of files.
"""

import marshal
import os
import struct
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from types import CodeType
from zipfile import ZipFile, ZipInfo

from hpc.base.files import sha256_of
from hpc.run.own_packages import DIRECTORIES
from hpc.run.rundir import LIBRARY, RunDir

_UNCHECKED = 1  # Python uses this byte code whatever times and content the source has (PEP 552)


def copy_packages(run: RunDir) -> None:
    """Write our packages into the archive of a run directory, and its checksum beside it.

    Python cannot add byte code to an archive, so it is copied, too: else each process would compile the modules again.
    """
    run.packages.parent.mkdir(parents=True, exist_ok=True)
    with ZipFile(run.packages, "w") as archive:
        for file, name in _files():
            archive.writestr(ZipInfo(name), file.read_bytes())
            if name.endswith(".py") and (code := _byte_code(file, f"{run.packages.name}/{name}")):
                archive.writestr(ZipInfo(f"{name}c"), code)
    run.package_checksums.write_text(f"{sha256_of(run.packages)}  {run.packages.name}\n")


def _files() -> Iterator[tuple[Path, str]]:
    """Yield the files of our packages, with their names in the archive."""
    for source in DIRECTORIES:
        place = Path(LIBRARY if source.name == "torchrelay" else "", source.name)
        for directory, below, names in os.walk(source):
            parent = place / Path(directory).relative_to(source)
            below[:] = [name for name in below if name != "__pycache__" and parent / name != Path(LIBRARY)]
            yield from ((Path(directory, name), str(parent / name)) for name in names)


def damaged_packages(run: RunDir) -> list[str]:
    """Return the names of the files with our packages in a run directory that are missing, or not as they were written.

    There is one such file; in a run of an earlier version, there are many.
    """
    checksums = run.package_checksums
    if not checksums.exists():
        return []  # the run of an earlier release
    recorded = [line.split("  ", 1) for line in checksums.read_text().splitlines()]
    damaged = [name for digest, name in recorded if _digest_of(checksums.parent / name) != digest]
    return damaged if recorded else [checksums.name]


def _digest_of(file: Path) -> str | None:
    try:
        return sha256_of(file)
    except FileNotFoundError:
        return None


def _byte_code(source: Path, name: str) -> bytes | None:
    """Return a module's byte code, whose tracebacks name the module by `name`; None if it would be compiled in vain.

    Python's loader compiles a module whose byte code is missing, and keeps the result for the next run.
    """
    if sys.dont_write_bytecode and not Path(cache_from_source(source)).exists():
        return None
    code = SourceFileLoader(source.stem, str(source)).get_code(source.stem)
    header = struct.pack("<4sI", MAGIC_NUMBER, _UNCHECKED) + source_hash(source.read_bytes())
    return header + marshal.dumps(_renamed(code, name)) if code else None


def _renamed(code: CodeType, name: str) -> CodeType:
    """Return code with another file name: Python would show the lines of the installed file, which may have changed."""
    constants = tuple(_renamed(each, name) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=name, co_consts=constants)
