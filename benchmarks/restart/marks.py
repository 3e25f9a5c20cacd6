"""When a process passed what: marks in one file per process, for `benchmarks/restart` and `start.py`.

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

    who: str
    """Of the ranks `rank-0`, of torchrun `torchrun-0`."""
    pid: int
    name: str
    at: float
    """time.time()."""


def mark(name: str, who: str | None = None) -> None:
    """Write that this process, by default a rank, passes here now."""
    if directory := os.environ.get("MARKS"):
        who = who or f"rank-{os.environ['RANK']}"
        line = json.dumps({"who": who, "pid": os.getpid(), "name": name, "at": time.time()})
        descriptor = os.open(Path(directory, f"{who}.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)


def mark_after(
    owner: Any, function: str, name: str, who: str | None = None, *, before: str = "", once: bool = False
) -> None:
    """Replace a function of a module or a class by one that marks its end, and its beginning by the name `before`.

    `once`: the first call marks its end, and puts the function back.
    """
    original: Callable[..., Any] = getattr(owner, function)

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if before:
            mark(before, who)
        result = original(*args, **kwargs)
        mark(name, who)
        if once:
            setattr(owner, function, original)
        return result

    setattr(owner, function, marked)


def read(directory: Path, after: float = 0.0) -> list[Mark]:
    """Return all marks of a directory that are later than a time, by time."""
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    # The last line may be half written.
    found = [Mark(**json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted((each for each in found if each.at > after), key=lambda each: each.at)
