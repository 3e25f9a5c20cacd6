"""`hpc VERB`: one entry point for the verbs and the programs of the trainer."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.cluster import hpc

import hpc as hpc_package
from hpc.__main__ import PROGRAMS, VERBS

ROOT = Path(__file__).parents[2]
HPC = Path(sys.executable).with_name("hpc")


@pytest.fixture
def beside_other_packages(tmp_path: Path) -> Path:
    """A directory with packages of a user's own that have the names of ours."""
    for name in ("hpc", "jobs", "training"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('imported the wrong {name}')\n")
    return tmp_path


def type_hpc(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([HPC, *arguments], cwd=directory, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_answers_help_and_says_how_many_runs_it_takes(verb: str, tmp_path: Path) -> None:
    done = hpc(verb, "--help-all" if verb in {"submit", "sweep", "scaling"} else "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    usage = done.stdout.splitlines()[0]
    assert usage.startswith(f"usage: hpc {verb} [-h] [OPTIONS]")
    assert ("[RUN ...]" in usage) == (verb in {"cancel", "report", "sync", "clean", "status"})
    assert ("RUN [RUN ...]" in usage) == (verb in {"cancel", "report", "sync"})


# All verbs start alike, and so do all programs.
@pytest.mark.parametrize("verb", ["report", "pack"])
def test_help_is_answered_beside_packages_of_the_same_names(verb: str, beside_other_packages: Path) -> None:
    done = type_hpc(beside_other_packages, verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: hpc {verb}")


@pytest.mark.parametrize("words", [["-m", "hpc"], ["-m", "hpc.submit"], ["-um", "hpc.supervise"]], ids=" ".join)
def test_module_runs_beside_packages_of_the_names_of_ours(words: list[str], beside_other_packages: Path) -> None:
    shutil.rmtree(beside_other_packages / "hpc")  # Python would run this one
    done = subprocess.run(
        [sys.executable, *words, "--help"], cwd=beside_other_packages, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_packages_of_the_names_of_ours_on_the_path_are_not_ours(beside_other_packages: Path, tmp_path: Path) -> None:
    shutil.rmtree(beside_other_packages / "hpc")  # the first one on the path is imported
    own = {**os.environ, "PYTHONPATH": str(beside_other_packages)}
    done = subprocess.run([HPC, "evaluate", "nope"], cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("hpc evaluate: there is no run 'nope'")


@pytest.mark.parametrize("words", [["-mhpc.status"], ["-um", "package.of.a.user"]], ids=" ".join)
def test_package_can_be_imported_while_python_looks_for_a_module(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "package" / "of" / "a").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("import hpc\n")
    (tmp_path / "package" / "of" / "a" / "user.py").touch()
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_python_without_our_dependencies_is_told_what_to_type(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "hpc.submit", "--dry-run"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"torchrelay is not installed for {sys.executable}: type " in done.stderr


def test_older_python_is_told_which_one_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(SystemExit) as stopped:
        hpc_package._prepare_verb()  # noqa: SLF001  # a process of an older Python cannot be had
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"torchrelay needs Python 3.11 or newer, and {sys.executable} is Python 3.9\n"


def test_help_names_all_commands_and_explains_one(tmp_path: Path) -> None:
    done = type_hpc(tmp_path, "--help")
    assert done.returncode == 0
    assert all(f"\n  {verb} " in done.stdout for verb in (*VERBS, *PROGRAMS))
    assert "hpc --version" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("  hpc submit ")
    assert type_hpc(tmp_path, "help").stdout == done.stdout
    done = type_hpc(tmp_path, "help", "status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: hpc status")


def test_version_is_that_of_the_distribution(tmp_path: Path) -> None:
    done = subprocess.run(
        [HPC.with_name("torchrelay"), "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert done.stdout == f"torchrelay {project['version']} ({ROOT / 'hpc'})\n"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("sumbit", "did you mean submit?"),
        ("x", "hpc help lists the commands"),
        ("smoke", "use hpc doctor --nodes N"),
    ],
)
def test_unknown_command_is_answered_with_the_nearest(typed: str, hint: str, tmp_path: Path) -> None:
    done = type_hpc(tmp_path, typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"hpc: there is no command {typed!r}: {hint}\n"


@pytest.mark.parametrize(
    "words",
    [
        *(["status", "~nobody-here/x"], ["status", "--runs-dir=~nobody-here/x"], ["cancel", "~nobody-here/x"]),
        ["submit", "--cluster=local", "--data=~nobody-here/x"],
        ["submit", "--cluster=local", "--data=digits", "--weights=~nobody-here/x.pt"],
        ["submit", "--cluster=local", "--python=~nobody-here/x", "--", "script.py"],
        ["scaling", "--name=x", "--runs-dir=~nobody-here/x"],
    ],
    ids=" ".join,
)
def test_home_directory_of_an_unknown_user_is_answered_in_one_line(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    done = hpc(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "there is no home directory ~nobody-here: write the whole path" in done.stderr
