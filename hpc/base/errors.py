"""Exceptions whose messages the user sees, and exit codes of ranks. Runs everywhere."""

import importlib.util
import shlex
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
    """A mistake that the user can correct. If `hpc submit` raises it, no job is queued, and no run is left behind."""

    exit_code = 2


class NotNowError(UserError):
    """A submission that Slurm or the storage refuses, and may accept later with the same flags."""


def pip_install(*packages: str) -> str:
    """Return the command that installs packages into this environment, which need not be the active one."""
    python = shlex.quote(sys.executable)
    # An environment that uv made has no pip.
    pip = f"{python} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {python}"
    return f"{pip} {shlex.join(packages)}"


# Packages by extra, where the names differ. Messages name the package: for an extra, pip must also find torchrelay.
_PACKAGES = {"sweep": "optuna", "mlflow": "mlflow-skinny"}


def need_package(package: str, extra: str, what: str) -> None:
    """Raise UserError if `package`, which our `extra` installs, is missing. The message says that `what` needs it."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{what} needs the package {package}, which is not in {sys.prefix}: type "
            f"{pip_install(_PACKAGES.get(extra, extra))}"
        )


# Modules of the packages of the extra `classifier`, except scikit-learn, of which only --data digits needs the images.
_CLASSIFIER = ("torch", "torchvision", "numpy", "simplejpeg", "PIL", "safetensors", "tensorboard")


def need_classifier(what: str) -> None:
    """Raise UserError if the packages of the built-in image classifier, which `what` needs, are not installed here.

    The classifier always runs in this environment, or in a copy of it: on this machine, and on the nodes.
    """
    if missing := [name for name in _CLASSIFIER if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"{what} needs the built-in image classifier, which is not in {sys.prefix} (no {', '.join(missing)}): type "
            f"{pip_install('torchrelay[classifier]')}, or submit a script of your own: "
            "hpc submit --nodes 2 --gpus-per-node 4 -- train.py"
        )
