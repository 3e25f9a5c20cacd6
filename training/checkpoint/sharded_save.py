"""A checkpoint that all ranks write together, each its own file. Runs on every rank.

Rank 0 makes the directory and gives it its name; the others tell it what they have written. All must see the same
storage.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

from hpc.core.files import fsync_file
from training.checkpoint.sharded_state import part_name
from training.checkpoint.storage import Fill, described, save_checkpoint
from training.runtime.process_group import ProcessGroup


def save_sharded(group: ProcessGroup, directory: Path, step: int, fill: Fill, keep: int | None) -> None:
    """Write a checkpoint, as `save_checkpoint` does. All ranks must call this, and `fill` is called on all.

    Args:
        group: with a control group that nothing else uses meanwhile.
        directory: of the checkpoints.
        step: the optimizer steps done.
        fill: writes the file of this rank's part into the directory that it is given, and rank 0's what else there is.
        keep: checkpoints to keep.

    Raises:
        OSError: on all ranks, if some rank could not write; the older checkpoints are all there.
    """
    problem = ""
    if group.is_rank_zero:
        try:
            save_checkpoint(directory, step, partial(_fill_all, group, fill), keep)
        except OSError as error:
            problem = str(error) or repr(error)
        # No directory is to be filled any more; if there was no room to make one, none has been.
        group.broadcast_bytes(b"")
    else:
        while temporary := group.broadcast_bytes(None):
            group.all_gather_object(_filled(group, fill, Path(os.fsdecode(temporary))))
    problem = group.all_gather_object(problem)[0]
    if problem:
        raise OSError(problem)


def _fill_all(group: ProcessGroup, fill: Fill, temporary: Path) -> dict[str, Any]:
    """Have all ranks write into a directory, and return what their files are."""
    group.broadcast_bytes(os.fsencode(temporary))
    told = group.all_gather_object(_filled(group, fill, temporary))
    problem = next((text for _, text in told if text), "")
    if problem:
        raise OSError(problem)
    return {name: description for files, _ in told for name, description in files.items()}


def _filled(group: ProcessGroup, fill: Fill, temporary: Path) -> tuple[dict[str, Any], str]:
    """Write this rank's part, durably; return what the manifest is to say of it, and what went wrong."""
    name = part_name(group)
    try:
        fill(temporary)
        fsync_file(temporary / name)
        return {name: described(temporary / name)}, ""
    except OSError as error:
        return {}, f"rank {group.rank}: {str(error) or repr(error)}"
