"""Formats numbers, times and text for the templates. A value that is not known becomes a dash. Pure; login node."""

from collections.abc import Callable
from datetime import datetime
from functools import partial
from math import isfinite

UNKNOWN = "–"  # noqa: RUF001 - a dash, as in a printed table


def known(value: object) -> bool:
    """Return whether a value is known: not None, NaN, infinite or empty."""
    return value is not None and (isfinite(value) if isinstance(value, float) else value != "")


def number(value: object, form: str = "{:,.0f}") -> str:
    """Format a number, by default as a whole one with thousands separators."""
    return form.format(value) if known(value) else UNKNOWN


def cause(value: object) -> str:
    """Format a cause with spaces, such as `time limit`."""
    return number(value, "{}").replace("_", " ")


def moment(seconds: object) -> str:
    """Format seconds since the epoch as a time by the clock of this machine."""
    if not isinstance(seconds, int | float) or not isfinite(seconds):
        return UNKNOWN
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: object) -> str:
    """Format a duration: 0.4 s, 12 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    if not isinstance(seconds, int | float) or not isfinite(seconds):
        return UNKNOWN
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    counts = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    largest = next(i for i, (count, _) in enumerate(counts) if count)
    return " ".join(f"{count} {unit}" for count, unit in counts[largest : largest + 2] if count)


def plural(count: int | None, noun: str) -> str:
    """Format a count, which may be unknown, with its noun: 1 step, 2 steps."""
    return f"{number(count)} {noun}{'s' * (count != 1)}"


FILTERS: dict[str, Callable[..., str]] = {
    **{one.__name__: one for one in (number, cause, moment, duration, plural)},
    "text": partial(number, form="{}"),
    "percent": partial(number, form="{:.2%}"),
    "loss": partial(number, form="{:.4f}"),
}
