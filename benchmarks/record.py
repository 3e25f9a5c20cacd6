"""What a benchmark leaves: a table in Markdown, and `benchmarks/results/NAME.json` with machine and versions."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpc.core.files import write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RIVALS = ROOT / "rivals" / "bin" / "python"
"""The rivals' Python, which `make rivals/ready` makes."""
Row = Mapping[str, Any]


def machine(packages: Iterable[str] = ("torch", "torchvision")) -> dict[str, Any]:
    """Where and with what is measured: to be called before the load of the benchmark itself.

    Args:
        packages: distributions whose versions matter; None in the answer: not installed.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _output("git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "load_average": round(os.getloadavg()[0], 1),
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "kernel": platform.release(),
        "slurm": _output("slurmctld", "-V"),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def table(rows: Sequence[Row]) -> str:
    """Rows as a table in Markdown, with the columns of all of them; lists and objects are left out of it."""
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if not any(isinstance(row.get(name), (list, dict)) for row in rows)
    ]
    numbers = {name for name in columns if all(isinstance(row.get(name), (int, float, type(None))) for row in rows)}
    lines = [
        " | ".join(name.replace("_", " ") for name in columns),
        "|".join("--:" if name in numbers else "---" for name in columns),
        *(" | ".join("" if row.get(name) is None else f"{row[name]}" for name in columns) for row in rows),
    ]
    return "\n".join(f"|{line}|" if set(line) <= set("-:|") else f"| {line} |" for line in lines)


def write(name: str, measured_on: dict[str, Any], rows: Sequence[Row], **more: Any) -> None:
    """Write `results/NAME.json`.

    Args:
        name: of the benchmark.
        measured_on: what `machine` said before it.
        rows: those of the table.
        more: what else was measured or set.
    """
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / f"{name}.json", {"machine": measured_on, **more, "rows": list(rows)})


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _output(*command: str) -> str | None:
    """What a program says, None if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
