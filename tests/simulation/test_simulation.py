"""Recovery in the simulated world: many schedules, and the defects that it has found. In processes of their own."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cluster import ROOT, Site

from simulation import fixes, known
from simulation.commands import observe

pytestmark = pytest.mark.timeout(900)


def simulation(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """What `python -m tests.simulation` prints."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=850)


def test_all_schedules_hold() -> None:
    done = simulation("--seeds=200")
    assert done.returncode == 0, done.stdout + done.stderr


def test_known_defects_stay_away() -> None:
    done = simulation("--known", "--seeds=3")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("defect", fixes.fixes())
def test_fix_can_be_taken_out(defect: str) -> None:
    fix = fixes.fixes()[defect]
    for name, source in fixes.without(fix["changes"]).items():
        compile(source, name, "exec")
    assert fix.get("schedule") in {None, *known.KNOWN}


def test_defect_is_noticed() -> None:
    done = simulation("--without-fixes", "All agents were killed", "--seeds=0")
    assert "the run has not ended: None, no job" in done.stdout
    assert done.returncode == 0


def test_seed_decides_everything() -> None:
    first, second = (simulation("--seed=42").stdout for _ in range(2))
    assert first.count("\n") > 5
    assert first == second


@pytest.mark.slurm
def test_simulated_slurm_is_like_the_real_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", site.slurm_conf)
    script = Path(site.path, "submit.sbatch")
    script.write_text("#!/bin/bash\n#SBATCH --nodes=1 --output=/dev/null\nsleep 3600\n")
    real = observe(script, time.sleep, time.monotonic)
    assert [list(each) for each in real] == json.loads(simulation("--commands").stdout)
