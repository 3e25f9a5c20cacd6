"""Where our packages are: in a clone, or in the `site-packages` of an installation. Runs on login and compute nodes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc.run.rundir import LIBRARY

_TOP = Path(__file__).parents[2]
# A clone and a run's copy have it in `training/relay`, and a wheel beside the others.
_RELAY = next(path for path in (_TOP / LIBRARY / "torchrelay", _TOP / "torchrelay") if path.is_dir())
DIRECTORIES = (_TOP / "hpc", _TOP / "jobs", _TOP / "training", _RELAY)
"""The directories of our packages."""


@contextmanager
def packages_alone() -> Iterator[str]:
    """Yield a directory with links to our packages, for the PYTHONPATH of a Python that is not ours, and remove it.

    In `site-packages`, our dependencies are beside our packages, and the other Python would import them, too.
    """
    with tempfile.TemporaryDirectory(prefix="torchrelay-packages-", ignore_cleanup_errors=True) as directory:
        for package in DIRECTORIES:
            Path(directory, package.name).symlink_to(package)
        yield directory
