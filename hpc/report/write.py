"""Numbers, times and names as people read them. Pure; runs on the login node."""

from datetime import datetime
from math import isfinite

import pandas as pd

UNKNOWN = "–"  # noqa: RUF001 - a dash, as in any printed table


def known(value: object) -> bool:
    """Whether there is a value: none of the ways in which a table says that there is not."""
    return value is not None and value is not pd.NA and not (isinstance(value, float) and not isfinite(value))


def number(value: object, form: str = "{:,.0f}") -> str:
    """A number, or a dash."""
    return form.format(value) if known(value) else UNKNOWN


def percent(value: object) -> str:
    """A share, such as 91.25%."""
    return number(value, "{:.2%}")


def text(value: object) -> str:
    """A text, or a dash."""
    return str(value) if known(value) and value != "" else UNKNOWN


def moment(seconds: object) -> str:
    """A time, by the clock of this machine."""
    if not isinstance(seconds, int | float) or not isfinite(seconds):
        return UNKNOWN
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: object) -> str:
    """A duration: 0.4 s, 12 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    if not isinstance(seconds, int | float) or not isfinite(seconds):
        return UNKNOWN
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    counts = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    largest = next(place for place, (count, _) in enumerate(counts) if count)
    return " ".join(f"{count} {unit}" for count, unit in counts[largest : largest + 2] if count)
