"""Collects the origin of a model, `made_from` in `model.json`: flags, data, code and versions. Runs on rank 0."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc.base.git import git_revision
from hpc.run.events.resumption import current_spec
from hpc.run.rundir import RunDir
from training.data.dataset import Data
from training.runtime.process_group import ProcessGroup
from training.runtime.rank_device import device_name
from training.runtime.run_context import RunContext
from training.runtime.software import versions


def spec_of(run: RunDir) -> dict[str, Any]:
    """Return the fields of a run's spec; none for a training that was started by hand."""
    with suppress(OSError, ValueError):
        return dict(json.loads(current_spec(run).read_bytes()))
    return {}


def made_from(context: RunContext, data: Data, group: ProcessGroup) -> dict[str, Any]:
    """Return everything on which the model depends, ready for JSON. Unknown values are None."""
    run = context.run_dir
    spec = spec_of(context.run_dir)
    revision = None
    # A training that was started by hand has no copy of the code.
    with suppress(OSError):
        revision = run.revision.read_text().strip() if run.spec.exists() else git_revision(Path.cwd())
    splits = {"train": data.train, "val": data.val, "test": data.test}
    return {
        "run": run.name,
        "recipe": context.recipe,
        "config": asdict(context.config),
        "spec": spec or None,
        "data": {
            # Nodes may train from copies of the data. The spec has the path that the user gave.
            "path": None if context.config.synthetic else spec.get("data") or context.config.data,
            "fingerprint": data.fingerprint,
            "images": {name: len(split) for name, split in splits.items() if split is not None},
        },
        "code": {"revision": revision},
        "versions": versions(),
        "ranks": {
            "world_size": group.world_size,
            "device": device_name(group.device),
        },
        "attempt": context.attempt,
    }
