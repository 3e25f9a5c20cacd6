"""Lists what a script has written into its working directory in the run. Runs on the login node."""

from collections import Counter
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from hpc.run.code_files import CodeFiles, parents, written_files
from hpc.run.rundir import RunDir
from hpc.status.summary import Summary, WrittenFiles

# A script with more files is asked about its first ones alone.
_MOST_FILES = 10_000


def with_written_files(row: Summary) -> Summary:
    """Return the summary with the files that the script has written; unchanged if the run records no copies."""
    run = RunDir(Path(row.run_dir))
    record = CodeFiles.load(run.code)
    if record is None:
        return row
    names = islice((name for name in written_files(run.code, record) if not name.endswith("/")), _MOST_FILES)
    made = parents((*record.copied, *record.linked))
    counts = Counter(_place(name, made) for name in names)
    found = [WrittenFiles(path=_shown(run.code, place), files=files) for place, files in counts.items()]
    return replace(row, written=tuple(found))


def _place(name: str, made: set[str]) -> str:
    """Return the highest directory of a file that the run itself has made, with a final slash; else the file."""
    parts = name.split("/")
    own = ("/".join(parts[:number]) for number in range(1, len(parts)))
    return next((f"{directory}/" for directory in own if directory not in made), name)


def _shown(code: Path, place: str) -> str:
    """Return a path as a user in the current directory types it: relative, unless it is outside."""
    path = f"{code}/{place}"
    return path.removeprefix(f"{Path.cwd()}/")
