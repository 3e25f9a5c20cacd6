"""How often something is saved: steps or durations as one types them. Pure; imports no torch."""

import re
from dataclasses import dataclass

from hpc.core.errors import UserError
from training.config.choices import flag


@dataclass(frozen=True, kw_only=True)
class Interval:
    """How often to save: every so many optimizer steps, or every so many seconds, or never if neither is set."""

    steps: int | None = None
    seconds: float | None = None
    largest_share: float | None = None
    """Part of the training's time that the saving may take: if it costs more, the seconds become more."""


_SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600}
# Half of the 1 % that is promised: not all that a snapshot costs can be measured while it is taken.
_AUTO = Interval(seconds=1.0, largest_share=0.005)
# field: (what it may be beside steps and a duration, how to say that)
WORDS: dict[str, tuple[dict[str, Interval], str]] = {
    "checkpoint_every": ({}, ""),
    "snapshot_every": ({"auto": _AUTO, "off": Interval()}, "auto, off, "),
}


def parse_interval(field: str, text: str) -> Interval:
    """Read `500` (steps), `30s`, `10m` or `2h`, or a word that the field knows.

    Raises:
        UserError: the text is none of these, or zero.
    """
    words, names = WORDS[field]
    if text.strip() in words:
        return words[text.strip()]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])|(\d+)", text.strip())
    if match:
        amount, unit, steps = match.groups()
        if steps and int(steps) > 0:
            return Interval(steps=int(steps))
        if amount and float(amount) > 0:
            return Interval(seconds=float(amount) * _SECONDS_OF_UNIT[unit])
    raise UserError(f"{flag(field)} is {text!r}: use {names}steps such as 500, or a duration such as 30s, 10m or 2h")
