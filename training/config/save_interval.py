"""Parses --checkpoint-every and --snapshot-every. Pure; runs on the login node and on every rank.

The ranks make torchrelay's `SaveTimes` of an interval. It is not imported here: the import of torchrelay takes tens of
milliseconds, which `hpc submit` would wait for.
"""

import re
from dataclasses import dataclass

from hpc.base.errors import UserError
from hpc.base.text import flag


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The interval between saves, in steps or seconds. With neither, nothing is saved."""

    steps: int | None = None
    seconds: float | None = None
    max_overhead: float | None = None
    """Largest share of the time that saving may take. If saving takes more, the interval grows; None for no limit."""


_SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600}
# Half of the 1 % that the help promises, because some costs of a snapshot cannot be measured while it is taken.
AUTO_OVERHEAD = 0.005
# For each field: the words that it accepts besides steps and durations.
INTERVAL_WORDS: dict[str, dict[str, Interval]] = {
    "checkpoint_every": {},
    "snapshot_every": {"auto": Interval(seconds=0.5, max_overhead=AUTO_OVERHEAD), "off": Interval()},
}


def parse_interval(field: str, text: str) -> Interval:
    """Parse `500` (steps), a duration such as `30s`, `10m` or `2h`, or a word in INTERVAL_WORDS.

    Raises UserError if the text has another form, or is zero.
    """
    words = INTERVAL_WORDS[field]
    if text.strip() in words:
        return words[text.strip()]
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])|(\d+)", text.strip()):
        amount, unit, steps = match.groups()
        if steps and int(steps) > 0:
            return Interval(steps=int(steps))
        if amount and float(amount) > 0:
            return Interval(seconds=float(amount) * _SECONDS_OF_UNIT[unit])
    names = "".join(f"{word}, " for word in words)
    raise UserError(f"{flag(field)} is {text!r}: use {names}steps such as 500, or a duration such as 30s, 10m or 2h")
