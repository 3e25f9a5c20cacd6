"""The example of a new kind of job in CONTRIBUTING.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_example_of_a_new_verb_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", Path("CONTRIBUTING.md").read_text(), re.DOTALL)
    (tmp_path / "collect.py").write_text(example)
    flags = ("--name=try", "--cluster=local", "--nodes=2", "--gpus-per-node=1", "--cpus-per-gpu=1", "--wait")
    verb = "import sys; from collect import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", verb, *flags], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")
    logs = sorted((tmp_path / "runs/try/logs/attempt-001").glob("rank-0?.log"))
    assert [log.read_text().count("PyTorch version:") for log in logs] == [1, 1]
