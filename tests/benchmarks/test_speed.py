"""`benchmarks/speed` in its small form, with the loops that need no library beyond the dev environment's."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_loops_on_two_ranks_take_turns_and_are_compared() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.speed", "--small", f"--rivals={sys.executable}",
            "--images", "JPEG", "--loops", "ours", "hand-written",
        ],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    names = next(line for line in printed if line[0] == "model")
    rows = [dict(zip(names, line, strict=True)) for line in printed if line[0] == "small-cnn"]
    assert [(row["images"], row["loop"]) for row in rows] == [
        ("JPEG", "ours"), ("JPEG", "hand-written"), ("packed", "ours"),
    ]  # fmt: skip
    assert all(float(row["images per second"]) > 0 and int(row["mib"]) > 0 for row in rows), rows
    assert "small-cnn, JPEG: ours by hand-written" in done.stdout
