"""This node's data: staged before the first round, told of in the ledger while it takes. Runs on compute nodes."""

import time
from dataclasses import asdict
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.units import duration_seconds
from hpc.staging.progress import CopyProgress
from hpc.staging.stager import Staged, Stager
from jobs.context import AgentContext
from jobs.log import log
from jobs.ranks.trainer_command import find_data
from jobs.staging.coordination import NodeGroup
from jobs.staging.packing import pack

# A copy of 100 GB must not look like a hang; one of a second needs no word.
_FIRST_SECONDS, _NEXT_SECONDS = 3.0, 10.0


def stage_data(node: AgentContext) -> Path | None:
    """Have the run's data on this node's disk, if it reads any. They stay in use until the attempt is over.

    Raises:
        StagingStopped: the agent was asked to stop, or the attempt is over.
        TorchrelayError: there is no way to read them.
    """
    if node.spec.data is None:
        return None
    source = Path(node.spec.data)
    staged = stage(node, source)
    if staged.in_place:
        log(f"reading {source} in place: {staged.in_place}")
    if node.spec.pack is None:
        return staged.path
    if staged.in_place:
        raise TorchrelayError(f"{staged.in_place}, so they cannot be packed either: submit with --pack off")
    began = time.monotonic()
    packed = pack(node, find_data(staged.path), node.spec.pack, _Watch(node, source))
    node.note("packed", node=node.place.host, path=str(packed), seconds=round(time.monotonic() - began, 3))
    return packed


def stage(node: AgentContext, source: Path) -> Staged:
    """Stage one source, and write down how it went."""
    team = NodeGroup(node, str(source))
    if team.is_head:
        node.duties.append(team.update)
    stager = Stager(
        Path(node.spec.stage_dir),
        group=team,
        watch=_Watch(node, source),
        keep_seconds=duration_seconds("--stage-keep", node.spec.stage_keep),
    )
    node.held.enter_context(stager)
    try:
        staged = stager.stage(source)
    except (TorchrelayError, OSError):
        # The others may be able to go on, and would wait for this node's list, or its word.
        team.decline()
        raise
    fields = {**asdict(staged), "path": str(staged.path), "seconds": round(staged.seconds, 3)}
    node.note("staged", node=node.place.host, source=str(source), **fields)
    if staged.fallback:
        log(f"read from shared storage after all: {staged.fallback}")
    if staged.in_memory:
        log(f"{staged.path} is in memory: the copy takes some of what the job may use (--mem)")
    return staged


class _Watch:
    """Looks after everything else while a copy is made, and says how far it is."""

    def __init__(self, node: AgentContext, source: Path) -> None:
        self._node, self._source = node, source
        self._next = time.monotonic() + _FIRST_SECONDS

    def __call__(self, progress: CopyProgress | None) -> bool:
        """Whether to stop."""
        node = self._node
        node.turn()
        if progress is not None and time.monotonic() > self._next:
            self._next = time.monotonic() + _NEXT_SECONDS
            node.note(
                "staging", node=node.place.host, source=str(self._source), activity=progress.activity,
                bytes_done=progress.bytes_done, bytes_total=progress.bytes_total,
                bytes_per_second=round(progress.rate), eta_seconds=progress.eta_seconds,
            )  # fmt: skip
        return bool(node.stop) or node.orders.over or node.head_is_lost
