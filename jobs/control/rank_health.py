"""Finds ranks that hang, and ranks that slow the others down, by their heartbeats. Runs in the first node's agent."""

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hpc.base.units import Duration
from hpc.run.events.kinds import SlowRank
from jobs.control.messages import RankHeartbeat

# While training, twenty steps without a sign of life are a hang; but slow storage may take a minute for one batch.
_HANG_STEPS, _HANG_MIN_SECONDS = 20.0, 60.0
# Starting, compiling (the first step), saving and the end have no usual duration.
_OTHER_PHASES_SECONDS = 900.0
_TIMED_PHASES = frozenset({"load", "step", "evaluate"})
# Between two signs of life, a user's script may do anything, such as evaluate or save.
_SCRIPT_PHASE = "script"
UNWATCHED = "unwatched"
"""Phase of a rank that writes no heartbeats, whose signs of life are what its processes do."""
COUNTED = "counted"
"""Phase of a rank that writes no heartbeats, but whose optimizer steps are counted (jobs.ranks.script.step_counter).
What its processes do is also a sign of life: an evaluation does no steps."""
_STOPPED = "T"
_STUCK = {_STOPPED: "is stopped", "t": "is stopped by a debugger", "D": "waits in the kernel for a device or storage"}
_SILENT_PHASES = frozenset({UNWATCHED, COUNTED})
# A straggler works at least twice as long per step as usual, for 10 s on end; differences below 20 ms are noise.
_SLOW_FACTOR, _SLOW_MIN_SECONDS, _SLOW_FOR_SECONDS = 2.0, 0.02, 10.0


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Ranks that show no sign of life."""

    rank: int | None
    """Rank for which the others wait; None if unknown."""
    seconds: float
    """Longest time since a rank's last sign of life."""
    detail: str
    unkillable: tuple[int, ...] = ()
    """Ranks that wait in the kernel for a device or storage of their node."""


def timeout_seconds(heartbeat: RankHeartbeat, typed: Duration | None) -> float:
    """Return for how many seconds a rank may show no sign of life. `typed` is --hang-timeout; None for `auto`."""
    limit = None if typed is None else typed.seconds
    steps = _HANG_STEPS * (heartbeat.step_seconds or 0.0)
    is_timed = heartbeat.phase in _TIMED_PHASES and heartbeat.step_seconds is not None
    if is_timed or heartbeat.state == _STOPPED:
        return limit or max(_HANG_MIN_SECONDS, steps)
    if heartbeat.phase == UNWATCHED and limit is None:
        return math.inf
    if heartbeat.phase in {_SCRIPT_PHASE, COUNTED}:
        return limit or max(_OTHER_PHASES_SECONDS, steps)
    return max(_OTHER_PHASES_SECONDS, limit or 0)


def find_hang(heartbeats: Mapping[int, RankHeartbeat], typed: Duration | None) -> Hang | None:
    """Return the hang if every rank, or a stopped one, has exceeded its timeout; None if not.

    Ranks that wait in a step for a rank that saves do not hang. If a process is stopped, however, all others wait for
    it for ever, whatever phase they are in.
    """
    # In many scripts only rank 0 writes heartbeats: then the others wait for it.
    heartbeats = {rank: beat for rank, beat in heartbeats.items() if beat.phase not in _SILENT_PHASES} or heartbeats
    late = [beat for beat in heartbeats.values() if beat.still_seconds > timeout_seconds(beat, typed)]
    is_everybody = bool(late) and len(late) == len(heartbeats)
    if not is_everybody and all(beat.state != _STOPPED for beat in late):
        return None
    seconds = max(heartbeat.still_seconds for heartbeat in heartbeats.values())
    unkillable = tuple(rank for rank, heartbeat in heartbeats.items() if heartbeat.state == "D")
    hanging = _find_hanging_rank(heartbeats)
    if hanging is None and all(beat.phase == UNWATCHED for beat in heartbeats.values()):
        return Hang(rank=None, seconds=seconds, detail=describe_silence(seconds))
    if hanging is None:
        phases = Counter(_where(heartbeat) for heartbeat in heartbeats.values())
        counts = ", ".join(f"{count} in {phase}" for phase, count in phases.items())
        detail = f"no rank has moved for {seconds:.0f} s: {counts}"
        return Hang(rank=None, seconds=seconds, detail=detail, unkillable=unkillable)
    slowest = heartbeats[hanging]
    state = _STUCK.get(slowest.state, f"has been in {_where(slowest)} for {slowest.still_seconds:.0f} s")
    detail = f"rank {hanging} {state}" + (", and the others wait for it" if len(heartbeats) > 1 else "")
    return Hang(rank=hanging, seconds=seconds, detail=detail, unkillable=unkillable)


def _where(heartbeat: RankHeartbeat) -> str:
    if heartbeat.phase == COUNTED:
        return f"the script after step {heartbeat.step} since its start"
    return f"{heartbeat.phase} after step {heartbeat.step}"


def describe_silence(seconds: float) -> str:
    """Say for how long ranks without heartbeats have shown no sign of life."""
    return f"no rank has used the processor, or read or written anything, for {seconds:.0f} s"


def is_silent(heartbeats: Mapping[int, RankHeartbeat]) -> bool:
    """Return whether no rank writes heartbeats, and none has shown a sign of life for 15 minutes."""
    ranks = heartbeats.values()
    return all(beat.phase in _SILENT_PHASES and beat.still_seconds >= _OTHER_PHASES_SECONDS for beat in ranks)


def _find_hanging_rank(heartbeats: Mapping[int, RankHeartbeat]) -> int | None:
    """Return the rank for which the others wait: stuck, alone at its step and phase, or behind. None if unknown."""
    stuck = [rank for rank, heartbeat in heartbeats.items() if heartbeat.state in _STUCK]
    if len(stuck) == 1:
        return stuck[0]
    if any(heartbeat.phase == UNWATCHED for heartbeat in heartbeats.values()):
        return None  # its step is unknown
    positions = {rank: (heartbeat.step, heartbeat.phase) for rank, heartbeat in heartbeats.items()}
    ranks_at = Counter(positions.values())
    alone = [rank for rank, position in positions.items() if ranks_at[position] == 1]
    if len(alone) == 1 and len(heartbeats) > 2:
        return alone[0]
    first_step = min(step for step, _ in positions.values())
    behind = [rank for rank, (step, _) in positions.items() if step == first_step]
    return behind[0] if len(behind) == 1 and len(heartbeats) > 1 else None


class StragglerDetector:
    """Reports a straggler once it has been slow for 10 s, and again only after it has recovered."""

    def __init__(self) -> None:
        self._slow_since: dict[int, float] = {}

    def find(self, heartbeats: Mapping[int, RankHeartbeat]) -> list[SlowRank]:
        """Return the stragglers to report now, without their nodes."""
        busy = {rank: beat.busy_seconds for rank, beat in heartbeats.items() if beat.busy_seconds is not None}
        if not busy:
            return []
        # The usual time is the median of all ranks; of two ranks, it is the time of the faster one.
        usual = sorted(busy.values())[(len(busy) - 1) // 2]
        stragglers = list[SlowRank]()
        now = time.monotonic()
        limit = max(_SLOW_FACTOR * usual, usual + _SLOW_MIN_SECONDS)
        slow = {rank: seconds for rank, seconds in busy.items() if seconds >= limit}
        for rank in [rank for rank in self._slow_since if rank in busy and rank not in slow]:
            del self._slow_since[rank]
        for rank, seconds in slow.items():
            if now - self._slow_since.setdefault(rank, now) > _SLOW_FOR_SECONDS:
                self._slow_since[rank] = float("inf")  # do not report it again while it is slow
                stragglers.append(SlowRank(rank=rank, node="", busy_seconds=seconds, median_seconds=usual))
        return stragglers
