"""When a rank passed what: marks in one file per rank, for `benchmarks/restart` and `start.py`.

Imports the standard library alone. A directory in the environment's `MARKS` gets a line of JSON for each mark; without
it nothing is written.
"""

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Mark:
    """One of them."""

    rank: int
    pid: int
    name: str
    at: float
    """time.time()."""


def mark(name: str) -> None:
    """Write that this rank passes here now."""
    if directory := os.environ.get("MARKS"):
        rank = int(os.environ["RANK"])
        line = json.dumps({"rank": rank, "pid": os.getpid(), "name": name, "at": time.time()})
        descriptor = os.open(Path(directory, f"{rank}.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)


def mark_first(owner: Any, function: str, name: str) -> None:
    """Have the first call of a function of a class mark its end."""
    original: Callable[..., Any] = getattr(owner, function)

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        mark(name)
        setattr(owner, function, original)
        return result

    setattr(owner, function, marked)


def read(directory: Path, after: float = 0.0) -> list[Mark]:
    """Return all marks of a directory that are later than a time, by time."""
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    # The last line may be half written.
    found = [Mark(**json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted((each for each in found if each.at > after), key=lambda each: each.at)
