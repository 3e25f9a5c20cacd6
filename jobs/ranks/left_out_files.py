"""Finds what a script could do in the user's directory and not in a run's `code/`. Runs on compute nodes."""

import glob
import os
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from hpc.run.code_files import CodeFiles
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec

_NO_FILE = re.compile(r"FileNotFoundError|NotADirectoryError|No such file or directory")
_QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"")
_NO_MODULE = re.compile(r"No module named '(\w[\w.]*)'")


def find_left_out(run: RunDir, spec: RunSpec, detail: str) -> str | None:
    """Return what to type if a rank has failed because the run lacks a file; None if not.

    Nothing is raised for what cannot be read, or for a name that is no path: this uses `os.path` and `glob`, where
    pathlib would raise.
    """
    names_file = _NO_FILE.search(detail) or _NO_MODULE.search(detail)
    record = CodeFiles.load(run.code) if names_file and not spec.in_place else None
    if record is None:
        return None
    root = Path(record.root)
    pairs = [*_modules(run, spec, record, detail), *_paths(run, spec, root, detail)]
    original = next(
        (own for own, in_run in pairs if os.path.exists(own) and not os.path.lexists(in_run)),  # noqa: PTH110
        None,
    )
    if original is None:
        return None
    original = Path(os.path.normpath(original))
    if not original.is_relative_to(root):
        return f"{original} exists, but a run sees only {root}: use an absolute path, or submit with --in-place"
    return (
        f"{original} exists, but not in the run's code: if it is new, type hpc resume {run.name} --new-code; "
        "else submit with --in-place"
    )


def _paths(run: RunDir, spec: RunSpec, root: Path, detail: str) -> Iterator[tuple[Path, Path]]:
    """Yield the paths in a message: in the user's directory, and in the run."""
    code = f"{run.code}/"
    for text in ("".join(groups) for groups in _QUOTED.findall(detail)):
        if text.startswith(code):
            yield root / text.removeprefix(code), Path(text)
        elif not text.startswith("/"):
            yield root / spec.working_directory / text, spec.start_directory(run) / text


def _modules(run: RunDir, spec: RunSpec, record: CodeFiles, detail: str) -> Iterator[tuple[Path, Path]]:
    """Yield the possible places of a missing module, as `_paths` does, next to the script and one level higher."""
    named = _NO_MODULE.search(detail)
    if named is None:
        return
    path = named[1].replace(".", "/")
    script = "" if spec.script[:1] in {(), ("-m",)} else os.path.dirname(spec.script[0])  # noqa: PTH120 - relative
    places = dict.fromkeys((spec.working_directory, os.path.join(spec.working_directory, script), record.top))  # noqa: PTH118
    for place, below, ending in product(places, ("", "src", ".."), ("", ".py", "*.so")):
        own = Path(record.root, place, below)
        for file in map(Path, glob.iglob(glob.escape(str(own / path)) + ending)):  # noqa: PTH207
            yield file, run.code / place / below / file.relative_to(own)
