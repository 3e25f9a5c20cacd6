"""Values that people write as one word: they are read where they are typed, and written in one form."""

import pytest

from hpc.base.units import (
    Duration,
    DurationOrAuto,
    Gpus,
    Memory,
    NodeRange,
    PortRange,
    TimeLimit,
    TimeLimitOrAuto,
    Word,
    slurm_seconds,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("1:02:03", 3723), ("1-2", 93600), ("1-02:03", 93780), ("2-00:00:01", 172801),
     ("infinite", None), ("UNLIMITED", None), ("n/a", None)],
)  # fmt: skip
def test_slurm_durations(text: str, seconds: int | None) -> None:
    assert slurm_seconds(text) == seconds


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (Duration, {"90s": "90s", "120s": "2m", "36h": "36h", "48h": "2d", "0s": "0s"}),
        (TimeLimit, {"90s": "2m", "12:00:00": "12h", "1-12": "36h", "00:90:00": "90m", "1-00:00:01": "1441m"}),
        (DurationOrAuto, {"auto": "auto", "60s": "1m"}),
        (TimeLimitOrAuto, {"auto": "auto", "01:00:00": "1h"}),
        (NodeRange, {"2": "2", "2:4": "2:4", "2:2": "2:2"}),
        (Gpus, {"0": "0", "2": "2", "a100:4": "a100:4", "01": "1"}),
        (Memory, {"0": "0", "64G": "64G", "64gb": "64gb"}),
        (PortRange, {"20000-20100": "20000-20100", "1024-1033": "1024-1033"}),
    ],
)
def test_each_value_has_one_form_which_reads_as_the_same_value(kind: type[Word], texts: dict[str, str]) -> None:
    for typed, written in texts.items():
        value = kind.parse(typed)
        assert str(value) == written
        assert kind.parse(written) == value


@pytest.mark.parametrize(
    ("kind", "texts", "message"),
    [
        (Duration, ("", "90", "1.5h", "-5s", "soon"), "is '.*': use a duration such as 90s"),
        (
            TimeLimit,
            ("", "soon", "1.5h", "-5", "1:2:3:4", "unlimited", "0", "0h"),
            "is '.*': use a duration such as 90m",
        ),
        (TimeLimit, ("24",), "is 24, which Slurm takes for minutes: use 24h or 24m"),
        (TimeLimit, ("12:00",), "is 12:00, which Slurm takes for minutes and seconds: use 12:00:00 for"),
        (NodeRange, ("", "0", "x", "4:2", "1:", ":3", "-1", "1:2:3", "1.5"), "is '.*': use a number such as 2, or a "),
        (Gpus, ("", "a100", "a100:", ":2", "a100:0", "-1", "1.5", "gpu:a100:2", "a b:2"), "is '.*or .* a100:2"),
        (Memory, ("64",), "is 64, which Slurm takes for megabytes: use 64G or 64M"),
        (Memory, ("64 G",), "is '64 G': use a whole number with a unit, such as 64G"),
        (PortRange, ("", "20000", "80-99", "20000-20008", "65530-65540"), "is '.*': use LOW-HIGH, 10 or more ports"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(kind: type[Word], texts: tuple[str, ...], message: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=message):
            kind.parse(text)
