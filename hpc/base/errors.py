"""Exceptions whose messages the user sees, and exit codes of ranks. Runs everywhere."""

import importlib.util
import sys

# Exit codes of a rank besides 0 (done, or stopped and saved) and 1 (any other error).
EXIT_BAD_INPUT, EXIT_BAD_NODE, EXIT_NO_SPACE, EXIT_DIVERGED = 2, 3, 4, 5


class TorchrelayError(Exception):
    """A failure. Its message is one line: the event, the value seen, and what to type."""

    exit_code = 1


class BadNodeError(TorchrelayError):
    """This node cannot train; another one might."""

    exit_code = EXIT_BAD_NODE


class UserError(TorchrelayError):
    """A mistake that the user can correct. If `hpc submit` raises it, no job is queued, and no file is left behind."""

    exit_code = 2


# Packages by extra, where the names differ. Messages name the package: for an extra, pip must also find torchrelay.
_PACKAGES = {"sweep": "optuna", "mlflow": "mlflow-skinny"}


def need_package(package: str, extra: str, what: str) -> None:
    """Raise UserError if `package`, which our `extra` installs, is missing. The message says that `what` needs it."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{what} needs the package {package}, which is not in {sys.prefix}: type pip install "
            f"{_PACKAGES.get(extra, extra)}"
        )
