"""The scripts of `make gpu` in their small form, on the CPU, as on a machine without a network."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.real_images import needs_fashion_mnist

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import bundle, exactness, part, two_ranks
from training.config.command_line import parse_flags
from training.config.dataset_layout import FASHION_MNIST
from training.verify_resume.__main__ import VerifyOptions
from training.verify_resume.local_launch import prepare_server

pytestmark = pytest.mark.timeout(1000)
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [*exactness.TRAININGS, *exactness.SMALL])
def test_flags_of_the_trainings_are_flags(name: str) -> None:
    flags = (exactness.TRAININGS | exactness.SMALL)[name]
    data = [] if "--synthetic" in flags else [f"--data={FASHION_MNIST}"]
    options = parse_flags(VerifyOptions, [*exactness._COMMON, *data, *flags], "verify_resume")  # noqa: SLF001
    assert (options.cuts, options.ranks) == (2, 1)


def check(found: dict[str, Any]) -> None:
    """On a CPU speeds say nothing; that bits are the same must hold here too."""
    assert found["rows"]
    assert found["goals"]
    assert all(goal["value"] is True for goal in found["goals"] if goal["goal"] == "the same bits"), found


def in_fork(module: str, output: Path, *arguments: str) -> None:
    """Run a part in a process that has imported torch already."""
    with output.with_suffix(".log").open("wb", 0) as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    sys.argv = ["part", module, *arguments, "--small", f"--output={output}"]
    part.main()


SLOW = ("script", "exactness", "files", "determinism", "stalls", "accuracy")


@needs_fashion_mnist
@pytest.mark.parametrize("name", ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_part_measures_something(name: str, tmp_path: Path) -> None:
    prepare_server()
    [wanted] = [each for each in gpu.PARTS if each.name == name]
    output = tmp_path / "part.json"
    arguments = (wanted.module, output, *wanted.arguments)
    process = multiprocessing.get_context("forkserver").Process(target=in_fork, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, output.with_suffix(".log").read_text()
    check(json.loads(output.read_text()))


@pytest.mark.slow
@needs_fashion_mnist
def test_two_ranks_end_with_the_same_bits() -> None:
    """They are forks of the server that the tests have, which no other process could share."""
    prepare_server()
    rows, goals = two_ranks.measure(small=True)
    check({"rows": rows, "goals": list(map(asdict, goals))})


@pytest.mark.slow
@needs_fashion_mnist
def test_launcher_is_run_as_a_part(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--minutes=15", f"--output={output}", "launcher"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [launched] = json.loads(output.read_text())["parts"]
    check(launched)
    assert [goal["value"] for goal in launched["goals"]] == [0, 0], "steps lost, processes left"


# Names of distributions that differ from those of their modules.
MODULES = {"pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}
LAUNCHED = [f"hpc.commands.{each}" for each in ("start.submit", "start.status", "start.cancel", "runs.resume")]


def test_make_gpu_needs_no_package_that_is_neither_expected_there_nor_in_the_bundle() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["classifier"]]
    names = [re.split("[<>=]", each)[0].lower() for each in wanted]
    brought = {re.split(";", each)[0] for each in (*gpu.BUNDLED, *bundle.IMPORTED)}
    absent = {MODULES.get(name, name) for name in names} - {"torch", *gpu.NEEDED, *brought}
    assert "bokeh" in absent, "a dependency that make gpu does not need"
    modules = [*LAUNCHED, "jobs.agent", "training.__main__", *(f"benchmarks.gpu.{each.module}" for each in gpu.PARTS)]
    # An import of a name that is None fails.
    program = f"import sys\nsys.modules.update(dict.fromkeys({absent}))\nimport {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
