"""Parses durations and port ranges as people and Slurm write them. Pure; runs everywhere."""

import re

from hpc.base.errors import UserError

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WITH_UNIT = re.compile(r"(\d+)([smhd])")
# Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
_SLURM = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")


def port_range(text: str) -> range:
    """Return the ports of a text LOW-HIGH, both included; an empty range for an empty text."""
    low, _, high = text.partition("-")
    return range(int(low), int(high) + 1) if text else range(0)


def slurm_seconds(text: str) -> int | None:
    """Return the seconds of a duration that Slurm wrote; None for UNLIMITED and its synonyms.

    Raises:
        ValueError: the text has none of Slurm's forms.
    """
    if text.lower() in {"unlimited", "infinite", "n/a", "none", "not_set"}:
        return None
    match = _SLURM.fullmatch(text)
    if match is None:
        raise ValueError(text)
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        parts = [*parts, 0, 0][:3]
    elif len(parts) == 1:
        parts = [*parts, 0]
    hours, minutes, seconds = [0, *parts][-3:]
    return int(match["days"] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def duration_seconds(flag: str, text: str) -> int:
    """Return the seconds of a flag's duration, a number with a unit: `90s`, `5m`, `2h`, `1d`.

    Raises:
        UserError: the value is not a duration.
    """
    match = _WITH_UNIT.fullmatch(text)
    if match is None:
        raise UserError(f"{flag} is {text!r}: use a duration such as 90s, 5m or 2h")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def walltime_minutes(text: str, flag: str = "--time") -> int:
    """Return the minutes, rounded up, of a flag's time limit: `90m`, `36h`, `2d`, or one of Slurm's forms.

    Raises:
        UserError: the value has another form, or is zero or unlimited.
    """
    match = _WITH_UNIT.fullmatch(text)
    try:
        seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else slurm_seconds(text)
    except ValueError:
        seconds = None
    if not seconds:
        raise UserError(f"{flag} is {text!r}: use a duration such as 90m, 12h or 2d, or Slurm's HH:MM:SS or D-HH:MM:SS")
    return -(-seconds // 60)


def format_minutes(minutes: int) -> str:
    """Return minutes in Slurm's form, `D-HH:MM:SS`, or `HH:MM:SS` for less than a day."""
    days, rest = divmod(minutes, 1440)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock
