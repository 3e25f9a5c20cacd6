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
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| small-cnn |")]
    assert [line[1:3] for line in lines] == [["JPEG", "ours"], ["JPEG", "hand-written"], ["packed", "ours"]]
    # images/s and the memory.
    assert all(float(line[3]) > 0 and int(line[11]) > 0 for line in lines), lines
    assert "small-cnn, JPEG: ours by hand-written" in done.stdout
