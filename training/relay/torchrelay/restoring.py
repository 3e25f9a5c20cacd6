"""Finds the newest usable state that any rank can read, and restores it on all ranks. Runs on every rank.

One rank reads a state and sends it to the others, so no rank needs the storage of another one. `restore_objects`
restores the state of a script; torchrelay's trainer calls `restore_newest` with its own way to load.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint_files import (
    discard,
    list_checkpoints,
    read_checkpoint,
    remove_published,
    remove_unpublished,
    step_of,
)
from .object_states import STATE_FILE, Saveable, load_states
from .rank_exchange import all_gather_bytes, broadcast_bytes, ranks
from .this_rank import THIS_RANK, warn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True, order=True)
class Candidate:
    """A saved state that a rank can read. Sorts by step; at the same step, a checkpoint is greater than a snapshot."""

    step: int
    durable: bool
    rank: int = field(compare=False)
    path: Path = field(compare=False)

    @property
    def source(self) -> str:
        """The kind of state: `checkpoint` or `snapshot`."""
        return "checkpoint" if self.durable else "snapshot"


def find_candidates(rank: int, checkpoints: Path | None, snapshots: Path | None) -> list[Candidate]:
    """Return the states in a rank's directories, the newest last. Removes what killed processes left unfinished."""
    found = list[Candidate]()
    for durable, directory in ((True, checkpoints), (False, snapshots)):
        if directory:
            remove_unpublished(directory, "step-*")
            paths = list_checkpoints(directory)
            found += [Candidate(step=step_of(path), durable=durable, rank=rank, path=path) for path in paths]
    return sorted(found)


def restore_newest(
    mine: list[Candidate], load: Callable[[Candidate], bool], group: "ProcessGroup | None", snapshots: Path | None
) -> Candidate | None:
    """Load the newest usable state, and return it, or None if no state is usable. All ranks must call this.

    `mine` are the states that this rank can read, the newest last. All ranks call `load` with the same state, which may
    be another rank's; `load` returns False on all ranks if the state is not usable. At the end, snapshots in the
    directory `snapshots` that are newer than the loaded state are removed.
    """
    while True:
        text = json.dumps(vars(mine[-1]) if mine else None, default=str)
        newest = [json.loads(each) for each in all_gather_bytes(text.encode(), group)]
        found = (Candidate(**{**each, "path": Path(each["path"])}) for each in newest if each)
        best = max(found, default=None)
        if best and mine and best.rank == mine[-1].rank:
            mine.pop()
        if best is None or load(best):
            if snapshots:
                remove_newer(snapshots, best.step if best else 0)
            return best


def remove_newer(directory: Path, step: int) -> None:
    """Remove the snapshots in a directory that are newer than `step`, and all unfinished ones."""
    remove_unpublished(directory, "step-*")
    for path in list_checkpoints(directory):
        if step_of(path) > step:
            remove_published(path)


def restore_objects(objects: Mapping[str, Saveable]) -> Candidate | None:
    """Load the newest intact state into the objects, and return it, or None if none exists. All ranks must call this.

    Raises:
        KeyError: the state was saved from objects of other names.
        OSError: a checkpoint cannot be read, but may be intact.
    """

    def load(candidate: Candidate) -> bool:
        data = _read(candidate) if candidate.rank == THIS_RANK.rank else None
        if data := broadcast_bytes(data, candidate.rank, ranks.group):
            load_states(objects, data)
        return bool(data)

    mine = find_candidates(THIS_RANK.rank, THIS_RANK.checkpoints, THIS_RANK.snapshots)
    return restore_newest(mine, load, ranks.group, THIS_RANK.snapshots)


def _read(candidate: Candidate) -> bytes:
    """Return the content of a state's file. Discard a damaged state or unreadable snapshot, and return b"" for it.

    Raises:
        OSError: a checkpoint cannot be read, but may be intact.
    """
    try:
        files = read_checkpoint(candidate.path)
    except OSError as error:
        if candidate.durable:
            raise
        files = str(error)
    if not isinstance(files, str) and STATE_FILE in files:
        return files[STATE_FILE]
    warn(f"{candidate.path} is not used: {files if isinstance(files, str) else f'it has no {STATE_FILE}'}")
    discard(candidate.path, durable=candidate.durable)
    return b""
