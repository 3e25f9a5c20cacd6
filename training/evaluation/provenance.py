"""What a model was made from: flags, data, code and versions, for `made_from` in `model.json`. Runs on rank 0."""

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
    """Everything that the model depends on, ready for JSON; null for what is unknown."""
    spec = _spec(context.run_dir)
    splits = {"train": data.train, "val": data.val, "test": data.test}
    return {
        "run": context.run_dir.name,
        "recipe": spec.get("recipe") or context.recipe,
        "config": asdict(context.config),
        "spec": spec or None,
        "data": {
            # Nodes train from copies: the spec has the path that the user gave.
            "path": None if context.config.synthetic else spec.get("data") or context.config.data,
            "fingerprint": data.fingerprint,
            "images": {name: len(split) for name, split in splits.items() if split is not None},
        },
        "code": {"revision": _revision(context.run_dir)},
        "versions": versions(),
        "ranks": {"world_size": group.world_size, "device": _device(group)},
        "attempt": context.attempt,
    }


def versions() -> dict[str, str | None]:
    """Versions of the software that can change a model's numbers."""
    cuda = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if cuda else None  # type: ignore[no-untyped-call]
    return {name: _installed(name) for name in _PACKAGES} | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": None if cudnn is None else str(cudnn),
        "driver": _driver(),
    }


def _installed(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return str(importlib.metadata.version(name))
    return None


def _driver() -> str | None:
    """The version of NVIDIA's driver."""
    with suppress(OSError):
        found = re.search(r"\d+\.\d+(\.\d+)*", _DRIVER.read_text())
        return found[0] if found else None
    return None


def _device(group: ProcessGroup) -> str:
    return torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else f"cpu ({platform.machine()})"


def _spec(run_dir: RunDir) -> dict[str, Any]:
    """The submitted spec; empty for a training that was started by hand."""
    with suppress(OSError, ValueError):
        return dict(json.loads(run_dir.spec.read_bytes()))
    return {}


def _revision(run_dir: RunDir) -> str | None:
    """The git revision of the submitted code, or of the working directory for a training that was started by hand."""
    with suppress(OSError):
        return run_dir.revision.read_text().strip()
    return None if run_dir.spec.exists() else git_revision(Path.cwd())
