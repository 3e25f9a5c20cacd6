"""Durations as Slurm and people write them, and the one that we choose. Pure; runs everywhere."""

import re

from hpc.core.errors import UserError

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WITH_UNIT = re.compile(r"(\d+)([smhd])")
# Slurm's own forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
_SLURM = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
# sbatch may deliver --signal up to a minute early but never late: a tenth of the limit leaves the save its time
# and costs little work.
_LEAST_LEAD_SECONDS, _MOST_LEAD_SECONDS = 30, 300
# What is left of the warning time when the ranks are given up: for the requeue itself.
REQUEUE_SECONDS = 10.0
# Slurm's default between SIGTERM and SIGKILL.
KILL_WAIT_SECONDS = 30.0


def slurm_seconds(text: str) -> int | None:
    """Seconds in a duration as Slurm writes it; None for UNLIMITED and the like.

    Raises:
        ValueError: the text is none of Slurm's forms.
    """
    if text.lower() in {"unlimited", "infinite", "n/a", "none", "not_set"}:
        return None
    match = _SLURM.fullmatch(text)
    if match is None:
        raise ValueError(text)
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    hours, minutes, seconds = ([0, *parts])[-3:]
    return hours * 3600 + minutes * 60 + seconds


def duration_seconds(flag: str, text: str) -> int:
    """Seconds of a flag's value with its unit: `90s`, `5m`, `2h`, `1d`.

    Raises:
        UserError: it is none.
    """
    match = _WITH_UNIT.fullmatch(text)
    if match is None:
        raise UserError(f"{flag} {text!r} is no duration: write for example 90s, 5m or 2h")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def walltime_minutes(text: str) -> int:
    """Whole minutes of a `--time` value: Slurm's forms, or `90m`, `36h`, `2d`.

    Raises:
        UserError: it is neither.
    """
    match = _WITH_UNIT.fullmatch(text)
    try:
        seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else slurm_seconds(text)
    except ValueError:
        seconds = None
    if not seconds:
        raise UserError(f"--time {text!r} is no duration: write 90m, 12h, 2d, or Slurm's HH:MM:SS or D-HH:MM:SS")
    return -(-seconds // 60)


def format_minutes(minutes: int) -> str:
    """Minutes as Slurm prints them, `D-HH:MM:SS`."""
    days, rest = divmod(minutes, 1440)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


def stop_lead_seconds(limit_minutes: int) -> int:
    """Seconds before the time limit at which the run is told to save and make way, unless the user says so."""
    return min(max(limit_minutes * 60 // 10, _LEAST_LEAD_SECONDS), _MOST_LEAD_SECONDS)


def save_timeout_seconds(grace_seconds: float) -> float:
    """How long ranks may take to save after a SIGTERM that is followed by SIGKILL after so many seconds."""
    return max(grace_seconds - REQUEUE_SECONDS, grace_seconds / 2)
