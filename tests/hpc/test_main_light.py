"""What `hpc` does where the launcher alone is installed: neither torch nor what else the image classifier needs."""

import os
import subprocess
from pathlib import Path

import pytest
from support.environments import make_light_venv, make_torch_venv

from hpc.__main__ import PROGRAMS

INSTALL = "uv pip install --python"  # the environment has no pip


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_light_venv(tmp_path_factory.mktemp("environments") / "light")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of a user's scripts."""
    return make_torch_venv(tmp_path_factory.mktemp("environments") / "own")


def type_hpc(light: Path, directory: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    inactive = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "CONDA_PREFIX"}}
    command, found = [light / "bin" / "hpc", *words], {**inactive, "HOME": str(directory), **variables}
    return subprocess.run(command, cwd=directory, env=found, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "words",
    [
        "submit --nodes 2 --gpus-per-node 4",
        "submit --cluster local --data photos --dry-run --json",
        "scaling --name a --nodes 1 2 --cluster local",
        "train --data photos",
    ],
)
def test_what_needs_the_classifier_says_what_to_install_and_how_to_submit_a_script(
    words: str, light: Path, tmp_path: Path
) -> None:
    done = type_hpc(light, tmp_path, *words.split())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"needs the built-in image classifier, which is not in {light} (no torch, torchvision, " in done.stderr
    advice = f"type {INSTALL} {light}/bin/python 'torchrelay[classifier]', or submit a script of your own: hpc submit"
    assert advice in done.stderr
    assert not list(tmp_path.iterdir()), "nothing was made"


@pytest.mark.parametrize("module", [*(module for module, _ in PROGRAMS.values()), "training.engine.preflight"])
def test_program_of_the_classifier_says_what_to_install(module: str, light: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [light / "bin/python", "-m", module, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    package = "torch" if ".engine." in module else "'torchrelay[classifier]'"
    assert done.stderr.startswith(f"error: python -m {module} needs the ")
    assert f", which is not in {light}" in done.stderr
    assert f": type {INSTALL} {light}/bin/python {package}" in done.stderr


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("sweep --name a --cluster local --param lr=1,2 -- train.py --lr {lr}", "optuna"),
        ("submit --cluster local --tracker wandb -- train.py", "wandb"),
    ],
)
def test_missing_package_of_an_extra_is_installed_beside_hpc_and_not_in_the_active_environment(
    words: str, package: str, light: Path, own: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    done = type_hpc(light, tmp_path, *words.split(), VIRTUAL_ENV=str(own))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.endswith(f"is not in {light}: type {INSTALL} {light}/bin/python {package}\n")


def test_script_has_the_active_environment_or_else_the_python3_on_the_path(
    light: Path, own: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    words = ("submit", "--cluster=local", "--dry-run", "--", "train.py")
    for variables in ({"VIRTUAL_ENV": str(own)}, {"PATH": f"{own}/bin:{os.environ['PATH']}"}):
        done = type_hpc(light, tmp_path, *words, **variables)
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[0].endswith(f", with {own}/bin/python{'3' if 'PATH' in variables else ''}")
    refused = type_hpc(light, tmp_path, *words, PATH=f"{light}/bin:{os.environ['PATH']}")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert (
        f"no environment is active, and python3 is {light}/bin/python3, which does not import torch" in refused.stderr
    )
