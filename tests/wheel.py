"""Runs the main job of an installed wheel on a real Slurm: `make test-wheel`. Its argument is the environment."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# A script under plain torchrun: nothing is saved or reported.
ALONE = """
from torchrelay import report, should_stop, state
with state() as saved:
    report(step=1, loss=0.5)
    assert (saved.step, should_stop()) == (0, False)
"""


def hpc(environment: Path, directory: str, *arguments: str) -> Any:
    """The document that a command prints."""
    done = subprocess.run(
        [environment / "bin/hpc", *arguments, "--json"], cwd=directory, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def main(environment: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="torchrelay-wheel.", dir="/var/tmp") as directory:
        names = "hpc, jobs, training, torchrelay"
        code = f"import {names}; print(*(package.__file__ for package in ({names})))"
        python = [environment / "bin/python", "-P", "-c", code]
        where = subprocess.check_output(python, cwd=directory, text=True).split()
        assert all(Path(path).is_relative_to(environment) for path in where), where
        Path(directory, "alone.py").write_text(ALONE)
        subprocess.run([environment / "bin/torchrun", "--nproc-per-node=2", "alone.py"], cwd=directory, check=True)
        hpc(environment, directory, "testbed", "up", "--nodes=2", "--gpus-per-node=4")
        try:
            done = hpc(environment, directory, "submit", "--nodes=2", "--gpus-per-node=4", "--epochs=2", "--wait")
            status = done["status"]
            assert (status["state"], status["world_size"]) == ("completed", 8), status
            assert status["test_accuracy"] > 0.8, status
            page = Path(hpc(environment, directory, "report", done["run"])["report"])
            assert page.stat().st_size > 0
        finally:
            hpc(environment, directory, "testbed", "down")
    print(f"trained with the wheel: test accuracy {status['test_accuracy']:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
