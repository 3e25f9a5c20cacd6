"""Saves a node's newest snapshot as a checkpoint. Runs in the node agent when the ranks have ended; needs no torch.

A snapshot is a state in a node's memory, in the format of a checkpoint. The ranks write it (`torchrelay.saving`).
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.checkpoint_files import (
    STATE_TENSORS,
    STATE_VALUES,
    checkpoint_path,
    list_checkpoints,
    read_checkpoint,
    save_checkpoint,
    step_of,
)
from torchrelay.saving.restoring import Shard, list_shards

from hpc.base.files import last_json_line, read_json_lines
from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir


def save_newest_as_checkpoint(node: NodeDir, run: RunDir, check: Callable[[], None] | None = None) -> int | None:
    """Save the newest usable snapshot of a node as a checkpoint of the run, unless a checkpoint is at least as new.

    No older checkpoint is deleted. Call this when no rank writes any more. Several nodes' agents may call it at once.
    `check` raises if the checkpoint may not be published. Returns the step of the saved snapshot, or None if no
    snapshot was saved. Shards (FSDP) are saved only if this node holds all of them. Raises OSError if the snapshot
    cannot be read, or the checkpoint cannot be written. No part of it remains.
    """
    saved = list_checkpoints(run.checkpoints)
    newest = step_of(saved[0]) if saved else 0
    for shards in reversed(_whole_states(node.snapshots)):
        step = shards[0].step
        if step <= newest:
            return None
        files = _read_all(shards)
        if not files:
            continue
        values = json.loads(files[STATE_VALUES])
        # A user's script saves no identity, and its states depend on no results.
        if "identity" in values and missing_results(values["objects"]["progress"], run):
            continue
        try:
            save_checkpoint(run.checkpoints, step, partial(_write_files, files), keep=None, check=check)
        except OSError:
            if checkpoint_path(run.checkpoints, step).exists():
                return None  # another node's agent has just saved this step
            raise
        return step
    return None


def _whole_states(snapshots: Path) -> list[list[Shard]]:
    """Return the states of which a node holds all shards, the newest last."""

    def state_of(shard: Shard) -> tuple[int, int, int]:
        return shard.step, shard.attempt, shard.count

    shards = sorted(list_shards(snapshots), key=lambda shard: (state_of(shard), shard.index))
    states = [list(state) for _, state in itertools.groupby(shards, state_of)]
    return [state for state in states if len(state) == state[0].count]


def _read_all(shards: Iterable[Shard]) -> dict[str, bytes]:
    """Return the files of the shards of a state by name, or {} if one is damaged. All but the tensors are equal."""
    files = dict[str, bytes]()
    for shard in shards:
        part = read_checkpoint(shard.path)
        if isinstance(part, str):
            return {}
        if shard.count > 1:
            part[f"state-{shard.index:05d}-of-{shard.count:05d}.safetensors"] = part.pop(STATE_TENSORS)
        files |= part
    return files


def _write_files(files: Mapping[str, bytes], directory: Path) -> None:
    for name, data in files.items():
        (directory / name).write_bytes(data)
        if (directory / name).read_bytes() != data:
            raise OSError(f"{directory / name} is not as it was written")


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
