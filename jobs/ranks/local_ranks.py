"""The ranks of this node as they are seen from outside: their heartbeats, and how they ended. Runs on compute nodes."""

import json
import time
from pathlib import Path
from typing import Any

from hpc.core.kernel import process_state
from hpc.core.nodedir import NodeDir
from hpc.core.outcome import cause_of_exit
from jobs.control.messages import RankFailure, RankHeartbeat

# A head node's agent that is busy for a moment misses none; the ledger has all of them.
_KEPT_FAILURES = 16


class LocalRanks:
    """Watches the ranks of one node, round after round."""

    def __init__(self, memory: NodeDir, ranks: int, node: str) -> None:
        self._memory, self._ranks, self._node = memory, ranks, node
        self._counts: dict[int, tuple[Any, float]] = {}
        self._round, self._ours = 0, True
        self.failures: tuple[RankFailure, ...] = ()
        """The last few, the newest last."""

    def begin(self, number: int, *, ours: bool) -> None:
        """A round begins: what the ranks of the last one left does not count any more.

        Args:
            number: of the round.
            ours: whether the ranks run our code; the user's may mean anything by its exit codes.
        """
        self._round, self._ours, self._counts = number, ours, {}
        self._memory.make()
        for path in (*self._memory.exits.iterdir(), *self._memory.heartbeat(0).parent.iterdir()):
            path.unlink(missing_ok=True)

    def beats(self) -> tuple[RankHeartbeat, ...]:
        """What each rank that is alive did last."""
        found = (self._beat(local_rank) for local_rank in range(self._ranks))
        return tuple(beat for beat in found if beat is not None)

    def _beat(self, local_rank: int) -> RankHeartbeat | None:
        fields = _read(self._memory.heartbeat(local_rank))
        state = process_state(fields["pid"]) if fields and "pid" in fields else None
        if fields is None or state in {None, "Z"}:
            return None
        mark, now = (fields["pid"], fields.get("count"), fields.get("step")), time.monotonic()
        if self._counts.get(local_rank, (None, 0.0))[0] != mark:
            self._counts[local_rank] = (mark, now)
        return RankHeartbeat(
            rank=fields.get("rank", local_rank),
            step=fields.get("step", 0),
            phase=fields.get("phase", ""),
            state=state or "",
            still_seconds=round(now - self._counts[local_rank][1], 2),
            step_seconds=fields.get("step_seconds"),
            busy_seconds=fields.get("busy_seconds"),
        )

    def new_failures(self, skew_seconds: float = 0.0) -> list[RankFailure]:
        """Ranks that have ended badly since the last time this was asked, in the order of their ends.

        Args:
            skew_seconds: what to add to this node's clock, to compare with other nodes' failures.
        """
        found = []
        for path in sorted(self._memory.exits.glob("[0-9]*.json")):
            fields = _read(path)
            path.unlink(missing_ok=True)
            if fields is not None:
                found.append(self._failure(fields, skew_seconds))
        self.failures = (*self.failures, *found)[-_KEPT_FAILURES:]
        return found

    def _failure(self, fields: dict[str, Any], skew_seconds: float) -> RankFailure:
        for key in ("started_at", "failed_at"):
            fields[key] += skew_seconds
        out_of_memory = fields.pop("out_of_memory")
        cause = cause_of_exit(fields["exit_code"], fields["signal"], out_of_memory, fields["detail"], ours=self._ours)
        return RankFailure(node=self._node, round=self._round, cause=cause, **fields)


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none, or none yet."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None
