"""A directory as if it lay on slow storage that all processes share (throttle.c): for benchmarks/staging."""

import mmap
import os
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# `struct storage`: next_ns, bytes, opens, ns_per_byte, open_ns, depth_ns.
_STATE = struct.Struct("qQQdqq")
# A reader that wakes up late on a busy machine catches up by so much: what real storage reads ahead meanwhile.
_DEPTH_NS = 50_000_000
MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What the storage gives, to all readers together."""

    name: str
    rate: float = 0.0
    """Bytes per second; 0: as many as the machine can."""
    open_seconds: float = 0.0
    """How much longer each opening of a file takes."""


class Storage:
    """The directory, its speed, and how much was read of it."""

    def __init__(self, path: Path, work: Path) -> None:
        """Compile the library.

        Args:
            path: the directory; its real path, without links.
            work: where the library and the counters go.
        """
        library, state = work / "throttle.so", work / "state"
        source = Path(__file__).with_suffix(".c")
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            sys.exit("there is no C compiler, cc, to make the slow storage with: install gcc")
        state.write_bytes(_STATE.pack(0, 0, 0, 0.0, 0, 0))
        with state.open("r+b") as file:
            self._state = mmap.mmap(file.fileno(), _STATE.size)
        self.environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "STORAGE_STATE": str(state),
            "STORAGE_PATH": str(path),
        }
        """Of processes that are to see it so."""

    def reset(self, speed: Speed) -> None:
        """Count from zero, with an empty bucket."""
        per_byte = 1e9 / speed.rate if speed.rate else 0.0
        open_ns = int(speed.open_seconds * 1e9)
        self._state[:] = _STATE.pack(time.monotonic_ns(), 0, 0, per_byte, open_ns, _DEPTH_NS)

    @property
    def bytes(self) -> int:
        """The bytes that were read since then."""
        return int(_STATE.unpack(self._state[:])[1])
