"""Saves a node's newest snapshot as a checkpoint. Runs in the node agent when the ranks have ended; needs no torch.

A snapshot is a state in a node's memory, in the format of a checkpoint. The ranks write it (`torchrelay.saving`).
"""

import filecmp
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.checkpoint_files import (
    STATE_TENSORS,
    STATE_VALUES,
    checkpoint_path,
    find_damage,
    list_checkpoints,
    manifest_entries,
    save_checkpoint,
    step_of,
)
from torchrelay.saving.restoring import list_shards, whole_states

from hpc.base.files import last_json_line, read_json_lines
from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir


def save_newest_as_checkpoint(node: NodeDir, run: RunDir, check: Callable[[], None] | None = None) -> int | None:
    """Save the newest usable snapshot of a node as a checkpoint of the run, unless a checkpoint is at least as new.

    No older checkpoint is deleted. Call this when no rank writes any more. Several nodes' agents may call it at once.
    `check` raises if the checkpoint may not be published. Returns the step of the saved snapshot, or None if no
    snapshot was saved. Shards (FSDP) are saved only if this node holds all of them.

    Raises:
        OSError: the snapshot cannot be read, or the checkpoint cannot be written. No part of it remains.
    """
    saved = list_checkpoints(run.checkpoints)
    newest = step_of(saved[0]) if saved else 0
    states = whole_states(list_shards(node.snapshots))
    for (step, *_), held in sorted(states.items(), reverse=True):
        if step <= newest:
            return None
        shards = [held[index][0] for index in range(len(held))]
        values = json.loads((shards[0] / STATE_VALUES).read_bytes())
        # A user's script saves no identity, and its states depend on no results.
        if "identity" in values and missing_results(values["objects"]["progress"], run):
            continue
        try:
            save_checkpoint(run.checkpoints, step, partial(_copy, shards), keep=None, check=check)
        except OSError:
            if checkpoint_path(run.checkpoints, step).exists():
                return None  # another node's agent has just saved this step
            raise
        return step
    return None


def _copy(shards: list[Path], directory: Path) -> None:
    """Copy the files of a state's shards. All but the tensors are equal. Raises OSError if a copy differs."""
    for index, shard in enumerate(shards):
        for name in manifest_entries(shard):
            is_part = len(shards) > 1 and name == STATE_TENSORS
            target = directory / (f"state-{index:05d}-of-{len(shards):05d}.safetensors" if is_part else name)
            shutil.copyfile(shard / name, target)
            if not filecmp.cmp(shard / name, target, shallow=False):
                raise OSError(f"{target} is not as it was written")
        # A rank that has renamed the directory meanwhile may already write the next snapshot into its files.
        if damage := find_damage(shard):
            raise OSError(f"{shard} was changed while it was copied: {damage}")


def missing_results(progress: Mapping[str, Any], run: RunDir) -> str:
    """Return which results (metrics, validation, best model) of a state's `progress` a run lacks, or an empty text.

    If rank 0's node is lost, another node's snapshot may be newer than the last metrics that rank 0 wrote. Resuming
    from that snapshot would leave a gap in the metrics.
    """
    last = last_json_line(run.train_metrics)
    step = last["step"] if last else 0
    if step < progress["logged_step"]:
        return f"{run.train_metrics} ends with step {step}, before its step {progress['logged_step']}"
    epoch = progress["evaluated_epochs"]
    validated = {line["epoch"] for line in read_json_lines(run.eval_metrics) if line["split"] == "val"}
    if epoch and epoch not in validated:
        return f"{run.eval_metrics} lacks the validation of epoch {epoch}"
    accuracy = progress["best_accuracy"]
    try:
        best = float(json.loads((run.best / "result.json").read_bytes())["best_val_accuracy"])
    except (OSError, ValueError, KeyError, TypeError):
        best = -1.0
    if accuracy is not None and best < accuracy:
        return f"{run.best} lacks the best model, of validation accuracy {accuracy:.2%}"
    return ""
