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

from hpc.core.git import git_revision
from hpc.core.resumption import current_spec
from training.data.dataset import Data
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext

_PACKAGES = "torchrelay", "torch", "torchvision", "numpy", "pillow"


def made_from(context: RunContext, data: Data, group: ProcessGroup) -> dict[str, Any]:
    """Everything that the model depends on, ready for JSON; null for what is unknown."""
    run, spec, revision = context.run_dir, dict[str, Any](), None
    with suppress(OSError, ValueError):
        spec = dict(json.loads(current_spec(run).read_bytes()))
    # A training that was started by hand has neither a spec nor a copy of the code.
    with suppress(OSError):
        revision = run.revision.read_text().strip() if run.spec.exists() else git_revision(Path.cwd())
    splits = {"train": data.train, "val": data.val, "test": data.test}
    cpu = f"cpu ({platform.machine()})"
    return {
        "run": run.name,
        "recipe": spec.get("recipe") or context.recipe,
        "config": asdict(context.config),
        "spec": spec or None,
        "data": {
            # Nodes train from copies: the spec has the path that the user gave.
            "path": None if context.config.synthetic else spec.get("data") or context.config.data,
            "fingerprint": data.fingerprint,
            "images": {name: len(split) for name, split in splits.items() if split is not None},
        },
        "code": {"revision": revision},
        "versions": versions(),
        "ranks": {
            "world_size": group.world_size,
            "device": torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else cpu,
        },
        "attempt": context.attempt,
    }


def versions() -> dict[str, str | None]:
    """Versions of the software that can change a model's numbers."""
    cuda = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if cuda else None  # type: ignore[no-untyped-call]
    driver = None
    with suppress(OSError):
        driver = re.search(r"\d+\.\d+(\.\d+)*", Path("/proc/driver/nvidia/version").read_text())
    installed: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": None if cudnn is None else str(cudnn),
        "driver": driver[0] if driver else None,
    }
