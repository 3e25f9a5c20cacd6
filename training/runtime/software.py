"""Finds the versions of the software on which a model's numbers depend. Runs on every rank.

The preflight calls it in the environment of a user's script, too, so it may import only the standard library, torch,
and those of our modules that import nothing else.
"""

import importlib.metadata
import platform
from contextlib import suppress

import torch

from hpc.base.kernel import driver_version

_PACKAGES = "torchrelay", "torch", "torchvision", "numpy", "pillow", "simplejpeg"


def versions() -> dict[str, str | None]:
    """Return the version of each software by name, or None if it is absent."""
    cuda = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if cuda else None  # type: ignore[no-untyped-call]
    installed: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": None if cudnn is None else str(cudnn),
        "driver": driver_version(),
    }
