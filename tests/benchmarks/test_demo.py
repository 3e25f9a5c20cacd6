"""`make demo` without the installation: the weights of an interrupted training are those of an undisturbed one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cluster import ROOT
from support.real_images import needs_fashion_mnist

pytestmark = [needs_fashion_mnist, pytest.mark.slow, pytest.mark.timeout(900)]


def summary(directory: Path, *flags: str, **environment: str) -> list[str]:
    """The lines below the last empty one of what the demo prints."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.demo", *flags], cwd=directory, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "python -m hpc.submit --nodes 2 --gpus-per-node 4" in done.stdout
    return done.stdout.rpartition("\n\n")[2].splitlines()


def test_demo_without_slurm_kills_a_rank(tmp_path: Path) -> None:
    killed, weights, report = summary(tmp_path, "--cluster=local")
    assert killed.startswith("killed a rank at step ")
    assert weights.startswith("the weights equal those of undisturbed-")
    assert Path(report.removeprefix("report: ")).is_file()


def test_demo_kills_a_rank_and_preempts_the_job(shared: Path, testbed: dict[str, Any]) -> None:
    killed, preempted, weights, report, end = summary(shared, SLURM_CONF=testbed["slurm_conf"])
    assert killed.startswith("killed a rank at step ")
    assert preempted.startswith("preempted the job at step ")
    assert preempted.endswith("with no steps computed again")
    assert weights.startswith("the weights equal those of undisturbed-")
    assert Path(report.removeprefix("report: ")).is_file()
    assert end.endswith("hpc testbed down ends it")
