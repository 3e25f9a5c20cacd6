"""Whether ranks hang, and which one the others wait for. Pure; from heartbeats."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hpc.core.units import duration_seconds
from jobs.control.messages import RankHeartbeat

# Of a training that is under way, so many of its steps, but no less than a slow storage may take for one batch.
_STEPS, _LEAST_SECONDS = 20.0, 60.0
# Starting, compiling (the first step), saving and the end have no usual duration.
_GENEROUS_SECONDS = 900.0
_TIMED_PHASES = frozenset({"load", "step", "evaluate"})
_STUCK = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for a device or storage"}


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Ranks that show no sign of life."""

    rank: int | None
    """The one that the others wait for, if that can be told."""
    seconds: float
    detail: str


def timeout_seconds(beat: RankHeartbeat, setting: str) -> float:
    """How long a rank may show no sign of life in what it does now. `setting` is --hang-timeout."""
    given = None if setting == "auto" else duration_seconds("--hang-timeout", setting)
    if beat.phase not in _TIMED_PHASES or beat.step_seconds is None:
        return max(_GENEROUS_SECONDS, given or 0)
    return given or max(_LEAST_SECONDS, _STEPS * beat.step_seconds)


def hung(beats: Mapping[int, RankHeartbeat], setting: str) -> Hang | None:
    """The hang, if there is one: every rank has been still for too long.

    One that is slow to save, say, holds up the others, which wait for it in a step; they must not be taken for hung.
    """
    if not beats or any(beat.still_seconds <= timeout_seconds(beat, setting) for beat in beats.values()):
        return None
    seconds = max(beat.still_seconds for beat in beats.values())
    culprit = _culprit(beats)
    if culprit is None:
        where = Counter(f"{beat.phase} after step {beat.step}" for beat in beats.values())
        detail = f"no rank has moved for {seconds:.0f} s: {', '.join(f'{n} in {text}' for text, n in where.items())}"
        return Hang(rank=None, seconds=seconds, detail=detail)
    beat = beats[culprit]
    how = _STUCK.get(beat.state, f"has been in {beat.phase} after step {beat.step} for {beat.still_seconds:.0f} s")
    return Hang(rank=culprit, seconds=seconds, detail=f"rank {culprit} {how}, and the others wait for it")


def _culprit(beats: Mapping[int, RankHeartbeat]) -> int | None:
    """The rank that is stopped, or that alone is somewhere else than the others: those wait for it in a collective."""
    stuck = [rank for rank, beat in beats.items() if beat.state in _STUCK and beat.state != "D"]
    if len(stuck) == 1:
        return stuck[0]
    places = {rank: (beat.step, beat.phase) for rank, beat in beats.items()}
    alone = [rank for rank, place in places.items() if Counter(places.values())[place] == 1]
    if len(alone) == 1 and len(beats) > 2:
        return alone[0]
    behind = min(places.values(), default=None)
    slowest = [rank for rank, place in places.items() if place[0] == (behind or (0,))[0]]
    return slowest[0] if len(slowest) == 1 and len(beats) > 1 else None
