"""Copies our three packages into a run, so that an upgrade does not change a run that waits or resumes. Login node.

They are copied as plain files. From a zip they would load as fast, but before 3.13 Python prints tracebacks without the
source lines of a zip.
"""

import os
import struct
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path

_PACKAGES = ("hpc", "jobs", "training")


def copy_packages(target: Path) -> None:
    """Copy our packages into a new directory, with the modes that the umask gives to new files.

    Their byte code is copied, too: else each node would compile the same modules.
    """
    source = Path(__file__).parents[3]
    for package in _PACKAGES:
        for directory, _, names in os.walk(source / package):
            new = target / Path(directory).relative_to(source)
            if new.name == "__pycache__":
                continue
            new.mkdir(parents=True)
            for name in names:
                text = Path(directory, name).read_bytes()
                (new / name).write_bytes(text)
                if name.endswith(".py") and (code := _byte_code(Path(directory, name), text)):
                    cache = Path(cache_from_source(new / name))
                    cache.parent.mkdir(exist_ok=True)
                    cache.write_bytes(code)


def _byte_code(source: Path, text: bytes) -> bytes | None:
    """Return a module's valid byte code, if any, in the form that Python uses whatever times files have (PEP 552)."""
    try:
        cached, modified = Path(cache_from_source(source)).read_bytes(), int(source.stat().st_mtime)
    except OSError:
        return None
    magic, flags, *recorded = struct.unpack("<4sIII", cached[:16].ljust(16, b"\0"))
    is_valid = magic == MAGIC_NUMBER and flags == 0 and recorded == [modified & 0xFFFFFFFF, len(text) & 0xFFFFFFFF]
    return struct.pack("<4sI", magic, 1) + source_hash(text) + cached[16:] if is_valid else None
