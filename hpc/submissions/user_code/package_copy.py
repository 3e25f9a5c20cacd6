"""Copies our packages into a run, so that an upgrade does not change a run that waits or resumes. Login node.

They are copied as plain files. From a zip they would load as fast, but before 3.13 Python prints tracebacks without the
source lines of a zip.
"""

import hashlib
import os
import struct
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path

from hpc.base.files import sha256_of
from hpc.run.own_packages import DIRECTORIES
from hpc.run.rundir import LIBRARY, RunDir


def copy_packages(run: RunDir) -> None:
    """Copy our packages into a run directory, with the modes that the umask gives to new files, and their checksums.

    Their byte code is copied, too: else each node would compile the same modules. It has no checksums.
    """
    checksums = list[str]()
    for source in DIRECTORIES:
        place = Path(LIBRARY if source.name == "torchrelay" else "", source.name)
        for directory, names_below, names in os.walk(source):
            below = place / Path(directory).relative_to(source)
            names_below[:] = [name for name in names_below if name != "__pycache__" and below / name != Path(LIBRARY)]
            (run.packages / below).mkdir(parents=True)
            for name in names:
                text = Path(directory, name).read_bytes()
                (run.packages / below / name).write_bytes(text)
                checksums.append(f"{hashlib.sha256(text).hexdigest()}  {below / name}\n")
                if name.endswith(".py") and (code := _byte_code(Path(directory, name), text)):
                    cache = Path(cache_from_source(run.packages / below / name))
                    cache.parent.mkdir(exist_ok=True)
                    cache.write_bytes(code)
    run.package_checksums.write_text("".join(checksums))


def damaged_packages(run: RunDir) -> list[str]:
    """Return the names of the files of our packages in a run directory that are missing, or not as they were copied."""
    if not run.package_checksums.exists():
        return []  # the run of an earlier release
    recorded = [line.split("  ", 1) for line in run.package_checksums.read_text().splitlines()]
    damaged = [name for digest, name in recorded if _digest_of(run.packages / name) != digest]
    return damaged if recorded else [run.package_checksums.name]


def _digest_of(file: Path) -> str | None:
    try:
        return sha256_of(file)
    except FileNotFoundError:
        return None


def _byte_code(source: Path, text: bytes) -> bytes | None:
    """Return a module's valid byte code, if any, in the form that Python uses whatever times files have (PEP 552)."""
    try:
        cached, modified = Path(cache_from_source(source)).read_bytes(), int(source.stat().st_mtime)
    except OSError:
        return None
    magic, flags, *recorded = struct.unpack("<4sIII", cached[:16].ljust(16, b"\0"))
    is_valid = magic == MAGIC_NUMBER and flags == 0 and recorded == [modified & 0xFFFFFFFF, len(text) & 0xFFFFFFFF]
    return struct.pack("<4sI", magic, 1) + source_hash(text) + cached[16:] if is_valid else None
