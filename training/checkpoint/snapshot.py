"""Saves snapshots as checkpoints, and checks that snapshots fit into memory. Runs on ranks and agents; needs no torch.

A snapshot is a state in a node's memory, in the format of a checkpoint. Ranks write snapshots
(`training.checkpoint.writer`). When the ranks have ended, the node agent saves the newest snapshot as a checkpoint.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.checkpoint_files import (
    checkpoint_path,
    find_damage,
    list_checkpoints,
    read_checkpoint,
    remove_published,
    save_checkpoint,
    step_of,
)

from hpc.base.files import last_json_line, read_json_lines
from hpc.base.kernel import available_memory_bytes
from hpc.run.nodedir import NodeDir
from hpc.run.rundir import STATE_VALUES, RunDir

_SHARD = re.compile(r"shard-(\d+)-of-(\d+)")


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
    for step, paths in sorted(_whole_states(node.snapshots), reverse=True):
        if step <= newest:
            return None
        files = _read_all(paths)
        if not files:
            continue
        # A user's script (torchrelay) saves another file, which depends on no results.
        if STATE_VALUES in files and missing_results(json.loads(files[STATE_VALUES]), run):
            continue
        try:
            save_checkpoint(run.checkpoints, step, partial(_write_files, files), keep=None, check=check)
        except OSError:
            if checkpoint_path(run.checkpoints, step).exists():
                return None  # another node's agent has just saved this step
            raise
        return step
    return None


def _read_all(paths: Iterable[Path]) -> dict[str, bytes]:
    """Return the files of snapshots by name, or {} if one is damaged. Values that ranks do not share are rank 0's."""
    files = dict[str, bytes]()
    for path in paths:
        part = read_checkpoint(path)
        if isinstance(part, str):
            return {}
        files = part | files
    return files


def _whole_states(directory: Path) -> Iterator[tuple[int, list[Path]]]:
    """Yield the step and the snapshots of each state of which a node holds all parts."""
    for path in list_checkpoints(directory):
        yield step_of(path), [path]
    shards = list_shards(directory)
    for (step, _, count), found in itertools.groupby(shards, lambda shard: (shard.step, shard.attempt, shard.count)):
        paths = [shard.path for shard in found]
        if len(paths) == count:
            yield step, paths


def _write_files(files: Mapping[str, bytes], directory: Path) -> None:
    for name, data in files.items():
        (directory / name).write_bytes(data)
        if (directory / name).read_bytes() != data:
            raise OSError(f"{directory / name} is not as it was written")


@dataclass(frozen=True, order=True)
class Shard:
    """A snapshot of a shard in a node's memory."""

    step: int
    attempt: int
    """Number of the attempt that wrote it."""
    count: int
    """Number of shards of the state."""
    index: int
    path: Path
    size_bytes: int


def shard_directory(index: int, count: int) -> str:
    """Return the name of the directory for the snapshots of a shard, such as `shard-00003-of-00008`."""
    return f"shard-{index:05d}-of-{count:05d}"


def list_shards(directory: Path) -> list[Shard]:
    """Return the intact snapshots of shards in a node's memory, the newest last. The directory need not exist."""
    found = list[Shard]()
    for parent in directory.iterdir() if directory.is_dir() else ():
        if name := _SHARD.fullmatch(parent.name):
            index, count = map(int, name.groups())
            for path in list_checkpoints(parent):
                with suppress(OSError, ValueError, KeyError):
                    attempt = json.loads((path / STATE_VALUES).read_bytes())["attempt"]
                    size_bytes = sum(file.stat().st_size for file in path.iterdir())
                    shard = Shard(step_of(path), attempt, count, index, path, size_bytes)
                    found += [] if find_damage(path) else [shard]
    return sorted(found)


def missing_results(values: Mapping[str, Any], run: RunDir) -> str:
    """Return which results of a state (metrics, validation, best model) the run directory lacks, or an empty text.

    If rank 0's node is lost, another node's snapshot may be newer than the last metrics that rank 0 wrote. Resuming
    from that snapshot would leave a gap in the metrics.
    """
    progress = values["progress"]
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


def lacking_space(directory: Path, size_bytes: int, *, buffer_bytes: int) -> str:
    """Return why a node's memory cannot take this much more in a directory, and buffers; an empty text if it can.

    Raises:
        OSError: the directory cannot be read.
    """
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if free < size_bytes:
        return f"{directory} has {_in_megabytes(free)} free, and snapshots need {_in_megabytes(size_bytes)} more"
    available, needed = available_memory_bytes(), size_bytes + buffer_bytes
    if available < needed:
        return f"{_in_megabytes(available)} of memory are available, and snapshots need {_in_megabytes(needed)}"
    return ""


def remove_others(directory: Path, keep: Collection[str]) -> None:
    """Remove every entry of a directory of snapshots whose name is not in `keep`. The directory need not exist."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name not in keep:
            remove_published(path)


def _in_megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
