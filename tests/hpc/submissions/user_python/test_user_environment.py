"""`--python` and `--container`: what the user's environment lacks is found before the queue."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import Site
from support.environments import BASE, SITE

from hpc.base.errors import UserError
from hpc.submissions.user_python import user_environment
from hpc.submissions.user_python.user_environment import check, resolve
from jobs.ranks.rank_environment import activated_environment, environment_of


@pytest.fixture
def venv(shared: Path) -> Path:
    subprocess.run([BASE, "-m", "venv", "--without-pip", str(shared / "env")], check=True)
    return shared / "env"


def install_torch(venv: Path, version: str) -> None:
    package = venv / SITE / "torch" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text(f"__version__ = {version!r}\nprint('torch greets')\n")
    for name in ("__init__.py", "run.py"):
        (package / name).touch()


@pytest.fixture
def program(shared: Path) -> Callable[[str], Path]:
    """Something in the place of an interpreter."""

    def write(text: str) -> Path:
        path = shared / "python"
        path.write_text(text)
        path.chmod(0o755)
        return path

    return write


def refused(python: Path, *setup: str, on_cluster: bool = True) -> str:
    return refusal("--python", lambda: check(python, setup, on_cluster=on_cluster))


def refused_image(given: str) -> str:
    return refusal("--container", lambda: resolve(given, None, (), on_cluster=True))


def refusal(flag: str, asked: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        asked()
    message = str(caught.value)
    assert message.startswith(f"{flag} ")
    assert "\n" not in message
    return message


def test_interpreter_is_found_by_its_own_path_not_by_that_of_its_link(
    venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(venv, "2.11.0+cu130")
    monkeypatch.chdir(venv)
    (venv / "torch.py").write_text("raise SystemExit('this is not torch')\n")
    assert check(Path("bin/python"), (), on_cluster=True) == (f"{venv}/bin/python", None)


def test_images_that_nodes_could_not_use_are_refused(shared: Path, tmp_path: Path) -> None:
    address = "docker://pytorch/pytorch:2.11.0"
    assert f"type apptainer pull image.sif {address}, and use --container image.sif" in refused_image(address)
    assert "does not exist" in refused_image(str(shared / "none.sif"))
    (tmp_path / "image.sif").touch()
    assert "is on this node's own disk: use a directory that all nodes share" in refused_image(f"{tmp_path}/image.sif")


def test_machine_without_apptainer_refuses_an_image_unless_setup_may_bring_it(
    shared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(shared))
    image = shared / "image.sif"
    image.touch()
    assert "neither apptainer nor singularity here: load its module, also on the nodes" in refused_image(str(image))
    assert resolve(str(image), None, ("module load apptainer",), on_cluster=True) == (str(image), "python3", None)
    assert "which is not checked: there is neither" in capsys.readouterr().err


def test_wrong_paths_are_refused(venv: Path) -> None:
    assert f"is a directory: use its interpreter, such as {venv}/bin/python" in refused(venv)
    assert "does not exist: use --python ENV/bin/python" in refused(venv / "bin" / "pyhton")
    assert "is not executable" in refused(venv / "pyvenv.cfg")


def test_environment_without_torch_is_refused_unless_setup_may_bring_it(
    venv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = venv / "bin" / "python"
    assert "does not import torch (ModuleNotFoundError: No module named 'torch'): install" in refused(python)
    assert check(python, ("module load PyTorch",), on_cluster=True) == (str(python), None)
    assert "imports torch only with --setup, if at all (ModuleNotFound" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0+cu117"])
def test_old_torch_is_refused(venv: Path, version: str) -> None:
    install_torch(venv, version)
    message = refused(venv / "bin" / "python", "module load PyTorch")
    assert f"which has torch {version}: install torch 2.6 or newer there" in message


def test_what_is_no_python_or_hangs_is_refused(program: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "which does not run as a Python interpreter here (exit code 3)" in refused(program("#!/bin/sh\nexit 3\n"))
    assert "which does not run as a Python interpreter here ([Errno 8] Exec format error" in refused(program("\x7fELF"))
    assert "which is Python 3.9: use 3.11 or newer" in refused(program("#!/bin/sh\necho 'torchrelay:[3, 9]'\n"))
    hangs = program("#!/bin/sh\necho 'torchrelay:[3, 12]'\nexec sleep 1000\n")
    monkeypatch.setattr(user_environment, "_IMPORT_SECONDS", 3.0)
    assert "does not import torch (it took longer than 3 s)" in refused(hangs)


def test_environment_on_a_nodes_own_disk_is_refused_on_a_cluster(venv: Path) -> None:
    install_torch(venv, "2.11.0")
    with tempfile.TemporaryDirectory(dir="/tmp") as local:
        link = Path(local, "env")
        link.symlink_to(venv)
        shared, _ = check(link / "bin" / "python", (), on_cluster=True)
        assert shared == f"{venv}/bin/python", "without the link, which other nodes do not have"
        subprocess.run([BASE, "-m", "venv", "--without-pip", f"{local}/own"], check=True)
        own = Path(local, "own", "bin", "python")
        assert "is on this node's own disk: use a directory that all nodes share" in refused(own)
        assert "does not import torch" in refused(own, on_cluster=False)
        (venv / SITE / "torch").rename(Path(local, "torch"))
        (venv / SITE / "torch").symlink_to(f"{local}/torch")
        assert "--python imports torch from /" in refused(venv / "bin" / "python")


@pytest.mark.parametrize("flag", ["--python", "--container"])
def test_they_are_for_scripts_alone(flag: str, shared: Path) -> None:
    (shared / "my.py").touch()
    for others, message in (
        (["--synthetic"], "applies only to your own script"),
        (["--stage-env", "--", "my.py"], "--stage-env copies the environment of hpc"),
    ):
        done = Site(shared, "/nonexistent").hpc("submit", "--cluster=local", f"{flag}=x", "--dry-run", *others)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"{flag} is x" in done.stderr
        assert message in done.stderr


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_active_environment_is_the_default(venv: Path, variable: str) -> None:
    site, words = Site(venv.parent, "/nonexistent"), ("submit", "--cluster=local", "--dry-run")
    (site.path / "my.py").touch()
    refusal = site.hpc(*words, "--", "my.py", **{variable: str(venv)})
    assert refusal.returncode == 2
    assert f"the active environment's Python is {venv}/bin/python, which does not import torch" in refusal.stderr
    assert "install torch there, or activate the environment of your script\n" in refusal.stderr
    install_torch(venv, "2.12.0")
    shown = site.hpc(*words, "--", "my.py", **{variable: str(venv)})
    assert shown.stderr.splitlines()[0].endswith(f", with {venv}/bin/python")
    typed = site.hpc(*words, f"--python={venv}/bin/python", "--name=a", "--", "my.py")
    note = f"hpc submit: my.py starts in {site.path}/runs/a/code, with {venv}/bin/python\n"
    assert typed.returncode == 0
    assert typed.stderr.startswith(note)
    for others in ({"VIRTUAL_ENV": sys.prefix}, {"CONDA_PREFIX": str(venv), "CONDA_DEFAULT_ENV": "base"}):
        shown = site.hpc(*words, "--", "my.py", **others)
        assert shown.stderr.splitlines()[0].endswith(f", with {sys.executable}"), "that of hpc"
    assert site.hpc("submit", "--cluster=local", "--dry-run", **{variable: str(venv)}).returncode == 0, "our trainer"


def test_torch_of_the_environment_is_known_to_lack_gpus(venv: Path) -> None:
    assert check(venv / "bin/python", ("module load x",), on_cluster=True)[1] is None, "it may come with --setup"
    install_torch(venv, "2.15.0+cpu")
    (venv / SITE / "torch/version.py").write_text("__version__ = '2.15.0+cpu'\ncuda = None\nhip = None\n")
    _, build = check(venv / "bin/python", (), on_cluster=True)
    assert build is not None
    assert build.accelerator is None


def test_an_environment_of_conda_is_active_as_one(tmp_path: Path) -> None:
    (tmp_path / "conda-meta").mkdir()
    base = {"PATH": "/ours/bin:/usr/bin", "VIRTUAL_ENV": "/ours"}
    python = f"{tmp_path}/bin/python"
    assert activated_environment(base, python, "/ours") == {
        "PATH": f"{tmp_path}/bin:/usr/bin", "CONDA_PREFIX": str(tmp_path)
    }  # fmt: skip
    assert environment_of(python)["CONDA_PREFIX"] == str(tmp_path)
    assert environment_of("/usr/bin/python3") == dict(os.environ), "its bin would hide the programs of modules"
