"""Which saved state a training goes on from, and how all ranks come by it. Runs on every rank.

Rank 0 offers the checkpoints, the first rank of each node its snapshots. The newest one is read, by who offered it; if
it is of no use, the next newest. So nothing is read in vain, and no rank needs another one's storage.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load

from hpc.errors import TorchrelayError
from training.checkpoint import NUMBERS, TENSORS, list_checkpoints, read_checkpoint, set_aside, step_of
from training.directories import sweep
from training.distributed import Ranks
from training.job import Job
from training.recorder import Recorder
from training.snapshot import not_recorded, remove_newer
from training.snapshotter import writing_directory
from training.state import TrainState, check_identity, read_numbers

CHECKPOINT, SNAPSHOT = "checkpoint", "snapshot"


@dataclass(frozen=True, kw_only=True, order=True)
class Offer:
    """A saved state that a rank could read. The largest is taken: the newest, and of equals the most durable."""

    step: int
    durable: bool
    rank: int = field(compare=False)
    path: Path = field(compare=False)

    @property
    def source(self) -> str:
        """What it is."""
        return CHECKPOINT if self.durable else SNAPSHOT


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The state that was taken."""

    name: str
    source: str
    numbers: dict[str, Any]


def restore(job: Job, state: TrainState, ranks: Ranks, recorder: Recorder) -> Restored | None:
    """Become the newest state that is intact, belongs to this run and has its past on record. None: there is none.

    A snapshot that is of no use is removed, as are all of a later step than the restored one.

    Raises:
        SharedError: the newest checkpoint belongs to a run with other data or settings, or to another version.
        TorchrelayError: the storage does not give it.
    """
    directory = writing_directory(job, ranks)
    offers = _offers(job, ranks, directory)
    restored = None
    while not restored and (best := max(filter(None, ranks.gather(offers[-1] if offers else None)), default=None)):
        if best.rank == ranks.rank:
            offers.pop()
        restored = _take(best, job, state, ranks, recorder)
    if directory:
        remove_newer(directory, state.progress.step)
    return restored


def _offers(job: Job, ranks: Ranks, snapshots: Path | None) -> list[Offer]:
    """What this rank can read, the best last."""
    places = {True: job.run_dir.checkpoints if ranks.leads else None, False: snapshots}
    found = []
    for durable, directory in places.items():
        if directory:
            sweep(directory, "step-*")
            paths = list_checkpoints(directory)
            found += [Offer(step=step_of(path), durable=durable, rank=ranks.rank, path=path) for path in paths]
    return sorted(found)


def _take(offer: Offer, job: Job, state: TrainState, ranks: Ranks, recorder: Recorder) -> Restored | None:
    """Become the state on offer, on all ranks, unless it is of no use."""
    mine = offer.rank == ranks.rank
    with ranks.together():
        files, problem = _examine(offer, state) if mine else ({}, "")
    problem = ranks.gather(problem)[offer.rank]
    numbers = {} if problem else json.loads(ranks.broadcast_bytes(files.get(NUMBERS), offer.rank))
    if not (problem or offer.durable):
        problem = ranks.gather(not_recorded(numbers, job.run_dir) if ranks.leads else "")[0]
    if problem:
        _discard(offer, problem, recorder, mine=mine)
        return None
    state.restore(load(ranks.broadcast_bytes(files.get(TENSORS), offer.rank)), numbers)
    return Restored(name=offer.path.name, source=offer.source, numbers=numbers)


def _examine(offer: Offer, state: TrainState) -> tuple[dict[str, bytes], str]:
    """The files of a state on offer, or why it is of no use."""
    try:
        files = read_checkpoint(offer.path)
        if isinstance(files, str):
            return {}, files
        numbers = read_numbers(files, offer.path.name)
        check_identity(numbers["identity"], state.identity, offer.path.name)
    except TorchrelayError as error:
        # Other flags than before are a mistake, to be undone; a snapshot is no reason to stop for.
        if offer.durable:
            raise
        return {}, str(error)
    return files, ""


def _discard(offer: Offer, reason: str, recorder: Recorder, *, mine: bool) -> None:
    recorder.console.warn(f"{offer.source} {offer.path} is not used: {reason}")
    recorder.event("checkpoint_rejected", path=str(offer.path), reason=reason)
    if mine and offer.durable:
        set_aside(offer.path)
    elif mine:
        shutil.rmtree(offer.path, ignore_errors=True)
