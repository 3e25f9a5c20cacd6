"""What the benchmarks share: flags, turns, the table that is printed, and the record `benchmarks/results/NAME.json`.

A benchmark has `Options`, a function that measures and returns its `Findings`, and a call of `benchmark`. What it
compares are contenders that take turns, so that a machine which slows down does so for all of them.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from hpc.base import program
from hpc.base.files import write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RIVALS = ROOT / "rivals" / "bin" / "python"
"""The rivals' Python, which `make rivals/ready` makes."""
Row = Mapping[str, Any]
Sample = Mapping[str, float]
"""The numbers of one measurement, by name."""
Turn = Callable[[], Sequence[Sample]]
"""Measures a contender once, and returns what it has found: usually one sample."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flag that every benchmark has."""

    small: bool = False
    """Try the script: measure little, and record nothing, because such numbers say nothing."""


AnyFlags = TypeVar("AnyFlags", bound=Flags)


@dataclass(frozen=True, kw_only=True)
class RivalFlags(Flags):
    """The flags of a benchmark that runs other tools."""

    rivals: Path = RIVALS
    """The Python of an environment with the dependency group `rivals`."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a benchmark has measured."""

    tables: Mapping[str, Sequence[Row]]
    """Rows, by the key that they have in the record; `rows` is the main table."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else the record keeps and no table shows."""


def benchmark(
    name: str,
    flags: type[AnyFlags],
    measure: Callable[[AnyFlags], Findings],
    *,
    small: Mapping[str, Any],
    packages: Sequence[str] = ("torch", "torchvision"),
) -> None:
    """Read the flags of a benchmark, measure, print the tables, and write the record.

    Args:
        name: the name of the record.
        flags: the dataclass of the flags.
        measure: the function that measures.
        small: the options that `--small` replaces.
        packages: the distributions whose versions matter.
    """
    options = program.parse(flags, sys.argv[1:], f"python -m benchmarks.{name}")
    if options.small:
        options = replace(options, **small)
    # Before the load of the benchmark itself.
    measured_on = machine(packages)
    found = measure(options)
    for title, rows in found.tables.items():
        print(f"\n{title}:\n\n{table(rows)}" if len(found.tables) > 1 else table(rows))
    if not options.small:
        RESULTS.mkdir(exist_ok=True)
        # A path says where this machine has something, which means nothing elsewhere.
        given = {key: value for key, value in asdict(options).items() if not isinstance(value, Path)}
        write_json(RESULTS / f"{name}.json", {"machine": measured_on, "options": given, **found.more, **found.tables})


def take_turns(contenders: Mapping[str, Turn], turns: int, *, warm_up: bool = False) -> dict[str, list[Sample]]:
    """Measure each contender so many times, one after the other, and return the samples by name.

    Each turn begins with another contender, so that none always follows the same one. With `warm_up` the first turn is
    not counted: it reads the files from the disk.
    """
    found: dict[str, list[Sample]] = {name: [] for name in contenders}
    for turn in range(turns + warm_up):
        place, names = turn % len(contenders), tuple(contenders)
        for name in (*names[place:], *names[:place]):
            samples = contenders[name]()
            if turn >= warm_up:
                found[name] += samples
        say(f"turn {turn + 1 - warm_up} of {turns}")
    return found


def say(text: str) -> None:
    """Show progress, where it does not get into the tables."""
    print(text, file=sys.stderr, flush=True)


def medians(samples: Sequence[Sample], digits: int = 2) -> dict[str, float]:
    """Return the median of each number."""
    return {name: round(median(each[name] for each in samples), digits) for name in samples[0]}


def spread(values: Sequence[float], digits: int = 2, unit: str = "") -> dict[str, float]:
    """Return the least and the most of some values."""
    return {f"least{unit}": round(min(values), digits), f"most{unit}": round(max(values), digits)}


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown, with the columns of all of them, but without lists and objects."""
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if not any(isinstance(row.get(name), (list, dict)) for row in rows)
    ]
    numbers = [all(isinstance(row.get(name), (int, float, type(None))) for row in rows) for name in columns]
    cells = [["" if row.get(name) is None else row[name] for name in columns] for row in rows]
    return markdown([name.replace("_", " ") for name in columns], cells, numbers)


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]], numbers: Iterable[bool]) -> str:
    """Return a table in Markdown. `numbers` says of each column whether it has numbers, which end at its right."""
    lines = [columns, ["--:" if has_numbers else "---" for has_numbers in numbers], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def processor() -> str:
    """Return the name of the processor, or of its architecture if it has none."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def machine(packages: Iterable[str]) -> dict[str, Any]:
    """Return where and with which versions is measured; None: there is none."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "load_average": round(os.getloadavg()[0], 1),
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "kernel": platform.release(),
        "slurm": _output("slurmctld", "-V"),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def versions(python: Path, packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of distributions in another environment."""
    names = list(dict.fromkeys(packages))
    code = "import sys; from importlib.metadata import version; [print(version(name)) for name in sys.argv[1:]]"
    if not python.exists():
        raise SystemExit(f"{python} does not exist: type make rivals/ready, or give --rivals")
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def _commit() -> str | None:
    """Return the commit, with `-dirty` if a tracked file but the results of other benchmarks is changed."""
    git = ("git", "-C", str(ROOT))
    commit = _output(*git, "rev-parse", "--short=8", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!benchmarks/results")
    return f"{commit}-dirty" if commit and changed else commit


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
