"""Takes fixes of the recovery out of the product (fixes.toml): the simulation must then find the defects."""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_COPIED = ("hpc", "jobs", "training", "tests/simulation", "tests/support")


def fixes() -> dict[str, dict[str, Any]]:
    """Return the fixes by the defect that each has ended."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def without(changes: list[tuple[str, str, str]]) -> dict[str, str]:
    """Return the changed files without a fix. Raises ValueError if a change does not fit a file any more."""
    files = dict[str, str]()
    for name, text, instead in changes:
        source = files.get(name) or (ROOT / name).read_text()
        if source.count(text) != 1:
            raise ValueError(f"{name} has this text {source.count(text)} times: {text}")
        files[name] = source.replace(text, instead)
    return files


def found(fix: dict[str, Any], *arguments: str) -> str | None:
    """Return what the simulation says first of the product without a fix; None if it notices nothing."""
    with tempfile.TemporaryDirectory(prefix="simulation-") as directory:
        for name in _COPIED:
            shutil.copytree(ROOT / name, Path(directory, name), ignore=shutil.ignore_patterns("__pycache__"))
        for name, source in without(fix["changes"]).items():
            Path(directory, name).write_text(source)
        known = [("--known", fix["schedule"], "--seeds=20")] if "schedule" in fix else []
        for which in (*known, arguments):
            command = [sys.executable, "-m", "tests.simulation", "--until-first", *which]
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
            if done.returncode:
                if (first := re.search(r"^(.*seed \d+: .*)", done.stdout, re.MULTILINE)) is None:
                    raise RuntimeError(f"the simulation itself failed:\n{done.stderr}")
                return first[1]
    return None


def table(*arguments: str, only: str = "") -> int:
    """Print for each fix what the simulation says without it. Returns how many it does not notice."""
    chosen = {defect: fix for defect, fix in fixes().items() if only.lower() in defect.lower()}
    missed = 0
    for defect, fix in chosen.items():
        says = found(fix, *arguments)
        missed += says is None
        print(f"| {defect} | {says or 'not found'} |", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} are found")
    return missed
