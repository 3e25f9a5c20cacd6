"""The benchmark of staging runs, and counts what every way reads."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ours_reads_the_files_once_and_cp_once_per_node(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "benchmarks.staging", "--files=50", "--repeats=1", "--nodes=2", "--storage=throttled",
        "--rate=50", "--only=cp -r", f"--source={tmp_path}", f"--disks={tmp_path}", f"--results={tmp_path / 'json'}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    results = json.loads((tmp_path / "json").read_text())
    read = {row["method"]: row["bytes_read"] for row in results["summary"]}
    assert 50 * 100_000 < read["torchrelay"] < 50 * 120_000
    assert read["cp -r"] == 2 * read["torchrelay"]
    assert results["throttle_mb_per_second"].keys() == {"1", "4"}
    assert "times ours" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["json"], "nothing is left behind"
