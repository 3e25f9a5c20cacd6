"""The scripts that measure restarts and the tool itself, in their small form, as far as they need no Slurm."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def printed(script: str, *flags: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{script}", "--small", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_parts_of_a_restart_add_up_to_its_total() -> None:
    head, _, row = printed("restart", "--kinds", "forked").splitlines()
    cells = dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    parts = [name for name in cells if name.endswith(", s") and name.split(",")[0] not in {"total", "least", "most"}]
    assert len(parts) == 11
    assert abs(sum(float(cells[part]) for part in parts) - float(cells["total, s"])) < 0.1
    assert float(cells["first step, s"]) > 0
    assert cells["restarts"] == "1"


def test_a_heartbeat_costs_something() -> None:
    _, _, row = printed("cost", "--parts", "heartbeat").strip().splitlines()
    assert float(row.strip("| ")) > 0
