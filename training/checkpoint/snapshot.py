"""Snapshots: copies of the state in a node's memory, in the format of a checkpoint. What needs no torch is here.

Runs on the first rank of every node, which writes them, and in the node's agent, which saves the newest one when the
ranks are gone. Two are kept while a third is being written, so the memory holds three at most.
"""

import json
import os
import shutil
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpc.core.files import last_json_line, read_json_lines, remove_temporaries
from hpc.core.kernel import available_memory_bytes
from hpc.core.nodedir import NodeDir
from hpc.core.rundir import RunDir
from training.checkpoint.storage import (
    NUMBERS,
    checkpoint_path,
    list_checkpoints,
    read_checkpoint,
    save_checkpoint,
    step_of,
)

KEPT = 2
_MEGABYTE = 10**6


def flush(node: NodeDir, run: RunDir) -> int | None:
    """Save the newest snapshot of a node as a checkpoint of the run, unless there is a checkpoint as new.

    No older checkpoint is deleted. Call it when no rank writes any more; agents of several nodes may do so at once.

    Returns:
        The step of the snapshot that was saved; None: there was nothing to save.

    Raises:
        OSError: it could not be written; then nothing is left of it.
        TorchrelayError: the snapshot cannot be read.
    """
    saved = list_checkpoints(run.checkpoints)
    newest = step_of(saved[0]) if saved else 0
    for path in list_checkpoints(node.snapshots):
        if step_of(path) <= newest:
            return None
        files = read_checkpoint(path)
        if isinstance(files, str) or not_recorded(json.loads(files[NUMBERS]), run):
            continue
        return step_of(path) if _save(files, step_of(path), run) else None
    return None


def _save(files: Mapping[str, bytes], step: int, run: RunDir) -> bool:
    """Save a checkpoint, unless the agent of another node has just done so."""
    try:
        save_checkpoint(run.checkpoints, step, partial(_fill, files), keep=None)
    except OSError:
        if checkpoint_path(run.checkpoints, step).exists():
            return False
        raise
    return True


def _fill(files: Mapping[str, bytes], directory: Path) -> None:
    for name, data in files.items():
        (directory / name).write_bytes(data)
        if (directory / name).read_bytes() != data:
            raise OSError(f"{directory / name} is not as it was written")


def not_recorded(numbers: Mapping[str, Any], run: RunDir) -> str:
    """What the run directory lacks of a state's past; nothing if it has all.

    Other nodes' snapshots may be newer than the last that rank 0 could write down before it was lost. Going on from
    them would leave a gap in the metrics.

    Args:
        numbers: of the state, as they are saved with it.
        run: whose metrics and best model are looked at.
    """
    progress = numbers["progress"]
    last = last_json_line(run.train_metrics)
    step = last["step"] if last else 0
    if step < progress["logged_step"]:
        return f"{run.train_metrics} ends with step {step}, before its step {progress['logged_step']}"
    epoch = progress["evaluated_epochs"]
    validated = {line["epoch"] for line in read_json_lines(run.eval_metrics) if line["split"] == "val"}
    if epoch and epoch not in validated:
        return f"{run.eval_metrics} lacks the validation of epoch {epoch}, which it knows of"
    accuracy = progress["best_accuracy"]
    if accuracy is not None and _best_accuracy(run) < accuracy:
        return f"{run.best} lacks the best model that it knows of"
    return ""


def _best_accuracy(run: RunDir) -> float:
    """Of the model that is kept; less than any if there is none."""
    try:
        result: dict[str, Any] = json.loads((run.best / "result.json").read_bytes())
        return float(result["best_val_accuracy"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1.0


def no_room(directory: Path, size: int) -> str:
    """Why snapshots of that many bytes do not fit into a node's memory; nothing if they do.

    Raises:
        OSError: the directory does not work.
    """
    missing = size * (KEPT + 1 - min(KEPT, len(list_checkpoints(directory))))
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if free < missing:
        return f"{directory} has {_in_megabytes(free)} free, and snapshots need {_in_megabytes(missing)} more"
    # And the copy that they are written from.
    left, missing = available_memory_bytes(), missing + size
    if left < missing:
        return f"there are {_in_megabytes(left)} of memory to spare, and snapshots need {_in_megabytes(missing)}"
    return ""


def remove_newer(directory: Path, step: int) -> None:
    """Remove the snapshots of later steps, which are of a future that did not come about, and all unfinished ones."""
    remove_temporaries(directory, "step-*")
    for path in list_checkpoints(directory):
        if step_of(path) > step:
            shutil.rmtree(path, ignore_errors=True)


def remove_others(directory: Path, keep: Collection[str]) -> None:
    """Remove the parts of states of which no rank here holds one any more, and whole ones: other ranks saved them."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def _in_megabytes(size: int) -> str:
    return f"{size / _MEGABYTE:,.1f} MB"
