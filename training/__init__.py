"""Trains image classifiers. Runs once per rank, under any torchrun, and does not depend on Slurm."""

import os
import re
import sys


def _check_packages() -> None:
    """Exit with one line if Python is about to run a program of this package whose packages are not installed."""
    words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    # The module may stand in one word with the flag, as in -umtraining.pack. In a fork, this finds no module.
    module = re.fullmatch(rf"(?:-[a-zA-Z]*?m)?({__name__}(?:\..+)?)", words[-1])
    if not module:
        return
    from hpc.base.environment import CALLED  # noqa: PLC0415 - most imports of this package do not need it
    from hpc.base.errors import UserError, need_classifier, need_package  # noqa: PLC0415

    command = os.environ.get(CALLED, f"python -m {module[1]}")
    try:
        if module[1].startswith(f"{__name__}.engine."):  # runs in the environment of a user's script, too
            need_package("torch", "torch", command)
        else:
            need_classifier(command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if sys.argv[:1] == ["-m"]:  # Python sets this only while it looks for the module to run
    _check_packages()
