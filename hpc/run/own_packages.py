"""Where our packages are: in a clone, in the `site-packages` of an installation, or in a run's archive.

Runs on login and compute nodes.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc.run.rundir import LIBRARY

_TOP = Path(__file__).parents[2]


def directories() -> tuple[Path, ...]:
    """Return the directories of our packages, in a clone or an installation."""
    # A clone has torchrelay in `training/relay`, and a wheel beside the others.
    relay = next(path for path in (_TOP / LIBRARY / "torchrelay", _TOP / "torchrelay") if path.is_dir())
    return _TOP / "hpc", _TOP / "jobs", _TOP / "training", relay


@contextmanager
def packages_alone() -> Iterator[str]:
    """Yield a directory with links to our packages, for the PYTHONPATH of a Python that is not ours, and remove it.

    In `site-packages`, our dependencies are beside our packages, and the other Python would import them, too.
    """
    with tempfile.TemporaryDirectory(prefix="torchrelay-packages-", ignore_cleanup_errors=True) as directory:
        for package in directories():
            Path(directory, package.name).symlink_to(package)
        yield directory


def own_pythonpath(packages: Path = _TOP) -> str:
    """Return a PYTHONPATH that begins with the directory of our packages, before a user's packages of the same names.

    The PYTHONPATH of this process follows, because our dependencies may be there.
    """
    return os.pathsep.join(filter(None, [str(packages), str(packages / LIBRARY), os.environ.get("PYTHONPATH")]))


def users_pythonpath(pythonpath: str, packages: Path = _TOP) -> list[str]:
    """Return the directories of a PYTHONPATH without those that `own_pythonpath` has added."""
    ours = {"", str(packages), str(packages / LIBRARY)}
    return [directory for directory in pythonpath.split(os.pathsep) if directory not in ours]
