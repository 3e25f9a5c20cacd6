"""The scripts of `make gpu` run: on the CPU, in their small form, as on a machine without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.real_images import needs_fashion_mnist

REPOSITORY = Path(__file__).parents[2]


# Every script; `files` does what the other measurements of throughput do, too.
PARTS = ("launcher", "two-ranks", "exactness", "files", "repeatability", "stalls", "accuracy")


@needs_fashion_mnist
@pytest.mark.timeout(1000)
def test_every_script_of_make_gpu_measures_something(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--small", "--minutes=15", f"--output={output}", *PARTS],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=1000,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(output.read_text())["parts"]
    assert [part["part"] for part in parts] == list(PARTS)
    assert all(part["rows"] and part["goals"] for part in parts), parts
    # On a CPU speeds say nothing; that bits are the same must hold here too.
    bits = {goal["name"]: goal["value"] for part in parts for goal in part["goals"] if goal["goal"] == "the same bits"}
    assert "two ranks on one GPU, killed twice" in bits
    assert set(bits.values()) == {True}, bits
    assert [goal["value"] for goal in parts[0]["goals"]] == [0, 0], "steps lost, processes left"


@needs_fashion_mnist
def test_the_bundle_holds_all_that_a_python_without_them_lacks(tmp_path: Path) -> None:
    bundle = [sys.executable, "-m", "benchmarks.gpu.bundle", str(tmp_path / "bundle")]
    subprocess.run(bundle, cwd=REPOSITORY, check=True, capture_output=True)
    names = "tyro, docstring_parser, typeguard, platformdirs, submitit, cloudpickle"
    # Without site-packages: what is imported is the bundle's.
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"import {names}; print(tyro.__file__)"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "bundle" / "packages")},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.startswith(str(tmp_path))
    assert len(list((tmp_path / "bundle" / "fashion-mnist").iterdir())) == 4
