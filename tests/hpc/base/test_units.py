import pytest

from hpc.base.errors import UserError
from hpc.base.units import slurm_seconds, walltime_minutes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("1:02:03", 3723), ("1-2", 93600), ("1-02:03", 93780), ("2-00:00:01", 172801),
     ("infinite", None), ("UNLIMITED", None), ("n/a", None)],
)  # fmt: skip
def test_slurm_durations(text: str, seconds: int | None) -> None:
    assert slurm_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "minutes"), [("90m", 90), ("12h", 720), ("2d", 2880), ("30s", 1), ("01:00:01", 61), ("7", 7)]
)
def test_walltime(text: str, minutes: int) -> None:
    assert walltime_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "soon", "1.5h", "-5", "1:2:3:4", "unlimited", "0", "0h"])
def test_bad_walltime(text: str) -> None:
    with pytest.raises(UserError, match="--time"):
        walltime_minutes(text)
