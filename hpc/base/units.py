"""The values that people write as one word: durations, ports, and what a job asks of its nodes. Pure; runs everywhere.

Each is a type: `parse` reads it where it was typed, `str` writes it in its one form, which `parse` reads again.
"""

import re
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import ClassVar, Self

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WITH_UNIT = re.compile(r"(\d+)([smhd])")
# Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
_SLURM = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
# Times that Slurm reads as much shorter than most people mean: pattern, Slurm's unit, and what to type instead.
_UNCLEAR_TIMES = (
    (r"\d+", "minutes", "{0}h or {0}m"),
    (r"\d+:\d+", "minutes and seconds", "{0}:00 for hours, or 00:{0}"),
)
# Fewest ports in a range. They suffice for one run on a node (control channel, staging of data and environment,
# rendezvous, the ranks' store), and leave some for other runs.
_MIN_PORTS = 10


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


def _seconds_with_unit(text: str) -> int | None:
    match = _WITH_UNIT.fullmatch(text)
    return int(match[1]) * _UNIT_SECONDS[match[2]] if match else None


class Word(ABC):
    """A value that one word represents on the command line, in YAML files and in `spec.json`."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """Return the value of a text.

        Raises:
            ValueError: the text has another form. The message continues a sentence that begins with the flag's name.
        """

    @abstractmethod
    def __str__(self) -> str:
        """Write the value."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class Duration(Word):
    """A duration, typed as a number with a unit: `90s`, `5m`, `2h`, `1d`."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the duration of a number with a unit."""
        seconds = _seconds_with_unit(text)
        if seconds is None:
            raise ValueError(f"is {text!r}: use a duration such as 90s, 5m or 2h")
        return cls(seconds)

    def __str__(self) -> str:
        """Write the duration in the largest unit that leaves no fraction."""
        sizes = ((size, unit) for unit, size in reversed(_UNIT_SECONDS.items()) if self.seconds % size == 0)
        size, unit = next(sizes) if self.seconds else (1, "s")
        return f"{self.seconds // size}{unit}"


class TimeLimit(Duration):
    """The time limit of a job, typed as a duration or in one of Slurm's forms. Slurm counts whole minutes."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return a time limit, rounded up to minutes. Refuses texts that Slurm reads in another unit than people do."""
        for pattern, unit, advice in _UNCLEAR_TIMES:
            if re.fullmatch(pattern, text) and slurm_seconds(text):
                raise ValueError(f"is {text}, which Slurm takes for {unit}: use {advice.format(text)}")
        return cls.parse_as_slurm(text)

    @classmethod
    def parse_as_slurm(cls, text: str) -> Self:
        """Return the time limit that Slurm understands, for which a number alone means minutes."""
        seconds = _seconds_with_unit(text)
        if seconds is None:
            with suppress(ValueError):
                seconds = slurm_seconds(text)
        if not seconds:
            raise ValueError(f"is {text!r}: use a duration such as 90m, 12h or 2d, or Slurm's HH:MM:SS or D-HH:MM:SS")
        return cls(60 * -(-seconds // 60))

    @property
    def minutes(self) -> int:
        """The limit in minutes."""
        return self.seconds // 60


class DurationOrAuto(Word):
    """A duration that the user has typed or, for `auto`, left to us."""

    kind: ClassVar[type[Duration]] = Duration

    def __init__(self, typed: Duration | None = None) -> None:
        self.typed = typed
        """The duration; None for `auto`."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return a duration, or `auto`."""
        return cls(None if text == "auto" else cls.kind.parse(text))

    def __str__(self) -> str:
        return "auto" if self.typed is None else str(self.typed)


class TimeLimitOrAuto(DurationOrAuto):
    """A time limit that the user has typed or, for `auto`, left to us."""

    kind = TimeLimit
    typed: TimeLimit | None


class NodeRange(Word):
    """The nodes of a run: a number such as `2`, or a range such as `2:4`."""

    def __init__(self, fewest: int, most: int | None = None) -> None:
        self.fewest = fewest
        """The fewest nodes with which a run starts."""
        self.most = fewest if most is None else most
        """The most nodes that train."""
        self.is_number = most is None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the nodes of a text N or MIN:MAX."""
        match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
        nodes = match and cls(int(match[1]), int(match[2]) if match[2] else None)
        if nodes is None or nodes.most < nodes.fewest:
            raise ValueError(f"is {text!r}: use a number such as 2, or a range such as 2:4")
        return nodes

    def __str__(self) -> str:
        return str(self.fewest) if self.is_number else f"{self.fewest}:{self.most}"

    def fewest_to_continue(self, *, elastic: bool) -> int:
        """Return the fewest nodes on which a run that has started continues."""
        return 1 if elastic and self.is_number else self.fewest

    def with_spares(self, spares: int) -> "NodeRange":
        """Return the nodes of a job that also has `spares`, which do not train."""
        return NodeRange(self.fewest + spares, None if self.is_number else self.most + spares)


class Gpus(Word):
    """The GPUs of a node: a number such as `2`, or a type and a number such as `a100:2`, as sbatch takes them."""

    def __init__(self, count: int, kind: str | None = None) -> None:
        self.count, self.kind = count, kind

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the GPUs of a text N or TYPE:N."""
        match = re.fullmatch(r"(?:([^\s:,=()]+):)?(\d+)", text)
        if match is None or (match[1] and not int(match[2])):
            raise ValueError(
                f"is {text!r}: use a number such as 2, or a type and a number such as a100:2; 0 for one rank per node "
                "on its CPUs"
            )
        return cls(int(match[2]), match[1])

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}" if self.kind else str(self.count)


class Memory(Word):
    """An amount of memory, in the form of sbatch: `64G`. `0` asks for all the memory of a node."""

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return an amount of memory. Refuses a number without a unit, because Slurm takes it for megabytes."""
        if not re.fullmatch(r"\d+([KMGT]B?)?", text, re.IGNORECASE):
            raise ValueError(f"is {text!r}: use a whole number with a unit, such as 64G")
        if re.fullmatch(r"[1-9]\d*", text):
            raise ValueError(f"is {text}, which Slurm takes for megabytes: use {text}G or {text}M")
        return cls(text)

    def __str__(self) -> str:
        return self._text


class PortRange(Word):
    """The ports that are open between nodes: `20000-20100`, both included."""

    def __init__(self, first: int, last: int) -> None:
        self.ports = range(first, last + 1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the ports of a text FIRST-LAST. Refuses too few ports, and ports that only root may use."""
        match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
        first, last = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1024 <= first <= last - _MIN_PORTS + 1 or last >= 2**16:
            raise ValueError(
                f"is {text!r}: use LOW-HIGH, {_MIN_PORTS} or more ports from 1024 to 65535, such as 20000-20100"
            )
        return cls(first, last)

    def __str__(self) -> str:
        return f"{self.ports[0]}-{self.ports[-1]}"
