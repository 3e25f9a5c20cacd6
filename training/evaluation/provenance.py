"""What a model was made from: flags, data, versions, the user's code. Runs on rank 0, once a training."""

import importlib.metadata
import json
import platform
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hpc.core.code_snapshot import git_revision
from hpc.core.rundir import RunDir
from training.data.dataset import Data
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext

_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = "torchrelay", "torch", "torchvision", "numpy", "pillow"


def made_from(context: RunContext, data: Data, group: ProcessGroup) -> dict[str, Any]:
    """All of it, ready for JSON; null for what is not known."""
    spec = _spec(context.run_dir)
    sizes = {name: len(part) for name in ("train", "val", "test") if (part := getattr(data, name)) is not None}
    return {
        "run": context.run_dir.name,
        "recipe": spec.get("recipe") or context.recipe,
        "config": asdict(context.config),
        "spec": spec or None,
        # Nodes train from copies: what the user named is in the spec.
        "data": {
            "path": None if context.config.synthetic else spec.get("data") or context.config.data,
            "fingerprint": data.fingerprint,
            "images": sizes,
        },
        "code": {"revision": _revision(context.run_dir)},
        "versions": versions(),
        "ranks": {"world_size": group.world_size, "device": _device(group)},
        "attempt": context.attempt,
    }


def versions() -> dict[str, str | None]:
    """Of what a model's numbers can depend on."""
    packages = {name: _installed(name) for name in _PACKAGES}
    return packages | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "cudnn": _cudnn(),
        "driver": _driver(),
    }


def _installed(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return str(importlib.metadata.version(name))
    return None


def _cudnn() -> str | None:
    number = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    return None if number is None else str(number)


def _driver() -> str | None:
    """The version of NVIDIA's driver."""
    with suppress(OSError):
        found = re.search(r"\d+\.\d+(\.\d+)*", _DRIVER.read_text())
        return found[0] if found else None
    return None


def _device(group: ProcessGroup) -> str:
    return torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else f"cpu ({platform.machine()})"


def _spec(run_dir: RunDir) -> dict[str, Any]:
    """What was submitted; nothing if the training was started by hand."""
    with suppress(OSError, ValueError):
        spec: dict[str, Any] = json.loads(run_dir.spec.read_bytes())
        return spec
    return {}


def _revision(run_dir: RunDir) -> str | None:
    """The revision of the code that was submitted, or that a training by hand runs in."""
    with suppress(OSError):
        return run_dir.revision.read_text().strip()
    return None if run_dir.spec.exists() else git_revision(Path.cwd())
