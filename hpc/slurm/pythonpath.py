"""Builds the PYTHONPATH of our programs, and takes it apart again. Runs on login and compute nodes."""

import os
from pathlib import Path

from hpc.run.rundir import LIBRARY

_PACKAGES = Path(__file__).parents[2]


def own_pythonpath(packages: Path = _PACKAGES) -> str:
    """Return a PYTHONPATH that begins with the directory of our packages, before a user's packages of the same names.

    The PYTHONPATH of this process follows, because our dependencies may be there.
    """
    return os.pathsep.join(filter(None, [str(packages), str(packages / LIBRARY), os.environ.get("PYTHONPATH")]))


def users_pythonpath(pythonpath: str, packages: Path = _PACKAGES) -> list[str]:
    """Return the directories of a PYTHONPATH without those that `own_pythonpath` has added."""
    ours = {"", str(packages), str(packages / LIBRARY)}
    return [directory for directory in pythonpath.split(os.pathsep) if directory not in ours]
