"""Tests whether the file system of the runs directory has the features that runs need. Runs on the login node."""

import os
import tempfile
from enum import StrEnum
from pathlib import Path

from hpc.base.files import UNSUPPORTED, fsync_directory, nearest_existing
from hpc.run.events.ledger import attempt_prefix


class Feature(StrEnum):
    """A feature that a file system may lack."""

    HARD_LINKS = "hard links"
    DIRECTORY_FSYNC = "fsync of directories"


LOST = {
    Feature.HARD_LINKS: "two jobs of a run could both train it, so no run can start",
    Feature.DIRECTORY_FSYNC: "when the storage loses power, the newest checkpoint may be lost, and the run continues "
    "from the previous one",
}
"""The consequences if a feature is missing, for warnings."""


def missing_features(directory: Path) -> list[Feature]:
    """Return the features that the file system of a directory lacks. The directory need not exist.

    Raises:
        OSError: nothing can be written there.
    """
    missing = []
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=nearest_existing(directory)) as name:
        probe = Path(name)
        (probe / "file").touch()
        try:
            os.link(probe / "file", probe / "link")
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            missing.append(Feature.HARD_LINKS)
        if not fsync_directory(probe):
            missing.append(Feature.DIRECTORY_FSYNC)
    return missing


def has_been_seen_by_nodes(runs_dir: Path) -> bool:
    """Return whether a run in this directory has started. If so, the nodes see the directory under this path."""
    return any(runs_dir.glob(f"*/events/{attempt_prefix(1)}*"))
