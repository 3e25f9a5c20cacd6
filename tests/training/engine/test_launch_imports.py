"""What a rank does not import: each import would add seconds to every restart."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HEAVY = {"torchvision", "bokeh", "pandas"}


def python(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_rank_imports_nothing_heavy_that_it_does_not_need(idx_data: Path, tmp_path: Path) -> None:
    flags = ("--data", str(idx_data), "--epochs=1", "--batch-size=64", "--run-dir=run")
    done = python("-X", "importtime", "-m", "training", *flags, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "torch.nn.parallel.distributed" in imported
    assert not imported & HEAVY
    assert (tmp_path / "run" / "final" / "result.json").exists()
