"""Tells a divergence from a faulty device, by repeating a step. Runs on every rank.

When the loss is not finite, the ranks restart (hpc.run.restart_budget), and their steps repeat bit for bit. If the loss
is not finite again, the training has diverged. If it is finite, the rank that was the first has probably computed
wrongly.
"""

import json
import socket
from typing import Any

from hpc.base.errors import BadNodeError
from hpc.base.files import refresh_nfs_cache
from training.engine.loss_meter import DivergedError
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext


class Recomputation:
    """The step whose loss was not finite, if these ranks compute it again."""

    def __init__(self, context: RunContext, group: ProcessGroup) -> None:
        self._context, self._group = context, group
        # The same attempt has the same flags, and a rank that has stayed on its node has the same device.
        self._conditions = {"attempt": context.attempt, "ranks": group.world_size}
        self._suspect: dict[str, Any] | None = None

    def describe(self, error: DivergedError) -> dict[str, Any]:
        """Return what `begin` must know later. All ranks must call this."""
        hosts = self._group.all_gather_json(socket.gethostname())
        host = None if error.rank is None else hosts[error.rank]
        return {"step": error.step, "loss": str(error.loss), "rank": error.rank, "host": host, **self._conditions}

    def begin(self, step: int) -> None:
        """Note whether the ranks, which begin after `step`, compute a step again whose loss was not finite.

        Call this only if their steps repeat bit for bit.
        """
        run_dir = self._context.run_dir
        refresh_nfs_cache(run_dir.path)  # rank 0 has written the file seconds ago
        try:
            divergence: dict[str, Any] = json.loads(run_dir.diverged.read_text())
        except (FileNotFoundError, ValueError):
            return
        # A file of an earlier version has no conditions.
        if divergence.items() >= self._conditions.items() and divergence["step"] > step:
            self._suspect = divergence

    def passed(self, step: int) -> None:
        """Judge the rank that was the first, if the loss is finite up to `step`.

        Raises BadNodeError if this rank has computed the step wrongly at the first time.
        """
        suspect = self._suspect
        if suspect is None or step < suspect["step"]:
            return
        self._suspect = None
        if (suspect["rank"], suspect["host"]) == (self._group.rank, socket.gethostname()):
            raise BadNodeError(
                f"rank {suspect['rank']} probably computes wrongly: its loss in step {suspect['step']} was "
                f"{suspect['loss']}, and finite when the step was repeated"
            )
