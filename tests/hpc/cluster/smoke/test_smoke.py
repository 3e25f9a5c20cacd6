"""`hpc smoke` as it is typed where it cannot work."""

from pathlib import Path

import pytest
from support.cluster import hpc


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "hpc smoke measures nodes of a cluster, but there is no Slurm here (sbatch is not on the PATH)"),
        (("--nodes=none",), "--nodes is 'none': use a number such as 2"),
    ],
)
def test_smoke_that_cannot_work_says_why_and_keeps_nothing(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    done = hpc("smoke", *flags, cwd=tmp_path, PATH="/nonexistent")
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []
