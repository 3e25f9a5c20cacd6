"""The errors that reach the user. Runs everywhere."""

import importlib.util
import sys

# Exit codes of a rank besides 0 (done, or stopped and saved) and 1 (any other error).
EXIT_BAD_INPUT, EXIT_BAD_NODE, EXIT_NO_SPACE, EXIT_DIVERGED = 2, 3, 4, 5


class TorchrelayError(Exception):
    """The work failed. The message is one line: the event, the value seen, and what to type."""

    exit_code = 1


class BadNodeError(TorchrelayError):
    """This node cannot train; another one might."""

    exit_code = EXIT_BAD_NODE


class UserError(TorchrelayError):
    """The user's mistake. Nothing was queued and nothing was left behind."""

    exit_code = 2


# The pip packages whose names differ from those of their extras in pyproject.toml. Installing an extra needs an index.
_PACKAGES = {"sweep": "optuna", "mlflow": "mlflow-skinny"}


def need_package(package: str, extra: str, what: str) -> None:
    """Raise a UserError if an optional package, which one of our extras installs, is missing."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{what} needs the package {package}, which is not in {sys.prefix}: type pip install "
            f"{_PACKAGES.get(extra, extra)}"
        )
