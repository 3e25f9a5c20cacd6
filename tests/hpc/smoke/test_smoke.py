"""`hpc smoke` as it is typed where it cannot work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "hpc smoke measures nodes of a cluster, and there is no Slurm here (sbatch is not on the PATH)"),
        (("--nodes=none",), "--nodes is 'none': use a number such as 2"),
    ],
)
def test_smoke_that_cannot_work_says_why_and_keeps_nothing(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    environment = {"PATH": "/nonexistent", "PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")}
    command = [sys.executable, "-m", "hpc", "smoke", *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []
