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
from benchmarks.gpu import bundle, exactness, part, stalls, throughput, two_ranks
from training.config.command_line import parse_flags
from training.config.dataset_layout import FASHION_MNIST
from training.verify_resume.__main__ import VerifyOptions
from training.verify_resume.local_launch import prepare_server

pytestmark = pytest.mark.timeout(1000)
REPOSITORY = Path(__file__).parents[2]


def test_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "stalls", "speed"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "there is no part speed: use some of launcher, two-ranks" in capsys.readouterr().err


def test_part_is_killed_when_its_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [stalling] = [each for each in gpu.PARTS if each.name == "stalls"]
    found = [gpu._run(stalling, tmp_path / "none.json", seconds, small=True) for seconds in (0.01, 0.0)]  # noqa: SLF001
    assert [each["problem"] for each in found] == ["killed after 0 s", "not run: the time was over"]
    gpu.show(found)
    assert "not run: the time was over" in capsys.readouterr().out


def test_ours_is_compared_with_the_loop_by_hand_and_the_fastest_rival() -> None:
    speeds = {
        (throughput.JPEG, throughput.OURS): 100.0, (throughput.JPEG, "hand-written"): 80.0,
        (throughput.JPEG, "timm"): 125.0, (throughput.PACKED, throughput.OURS): 190.0,
        (throughput.SYNTHETIC, throughput.OURS): 200.0,
    }  # fmt: skip
    rows = [{"images": images, "loop": loop, "images_per_second": speed} for (images, loop), speed in speeds.items()]
    by_hand, by_fastest, packed = throughput.goals("resnet50-files", rows)
    assert (by_hand.value, by_fastest.value, packed.value) == (1.25, 0.8, 0.95)
    assert packed.met is None, "not on a GPU"


def test_snapshot_that_takes_longer_is_taken_less_often() -> None:
    row = {"model": "m", "waits": 0, "snapshot_ms": 40.0, "snapshot_measured_ms": 0.0, "checkpoint_ms": 5.0}
    waits, checkpoint, snapshots = stalls.goals(row)
    assert (waits.value, checkpoint.value, snapshots.value) == (0, 5.0, 0.08)
    assert stalls.goals(row | {"snapshot_measured_ms": 40.0})[2].value == 0.005


@pytest.mark.parametrize("name", [*exactness.TRAININGS, *exactness.SMALL])
def test_flags_of_the_trainings_are_flags(name: str) -> None:
    flags = (exactness.TRAININGS | exactness.SMALL)[name]
    data = [] if "--synthetic" in flags else [f"--data={FASHION_MNIST}"]
    options = parse_flags(VerifyOptions, [*exactness._COMMON, *data, *flags], "verify_resume")  # noqa: SLF001
    assert (options.cuts, options.ranks) == (2, "1")


@needs_fashion_mnist
def test_images_that_the_device_makes_are_the_same(tmp_path: Path) -> None:
    assert exactness.same_images(part.data_directory(tmp_path))


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


@pytest.mark.slow
@needs_fashion_mnist
@pytest.mark.parametrize("name", ["exactness", "files", "determinism", "stalls", "accuracy"])
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


def test_the_results_of_parts_that_were_not_run_are_kept() -> None:
    def part(name: str, seconds: float) -> dict[str, Any]:
        return {"part": name, "seconds": seconds}

    merged = gpu.merge([part("vit", 1), part("stalls", 1)], [part("stalls", 2), part("files", 2)])
    assert merged == [part("vit", 1), part("stalls", 2), part("files", 2)]


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
