"""The Python of a batch script, from real files and Bash."""

import sys
from pathlib import Path

import pytest

from hpc.submissions.sbatch.statement_reader import SetupLine
from hpc.submissions.sbatch.translation import find_python


def lines(*texts: str) -> list[SetupLine]:
    return [SetupLine(line=number, text=text) for number, text in enumerate(texts, 2)]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The directory of the programs of an environment."""
    programs = tmp_path / "env" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "torchrun").write_text(f"#!{programs}/python\n")
    (programs / "torchrun").chmod(0o755)
    return programs


@pytest.mark.parametrize("program", ["python", "torchrun", "env/bin/python", "{env}/torchrun"])
def test_python_is_found_by_name_and_by_path(environment: Path, tmp_path: Path, program: str) -> None:
    setup = lines("export A=1", f"ENV={environment}", "export PATH=$ENV:$PATH")
    found = find_python(setup, program.replace("{env}", str(environment)), tmp_path)
    assert found == (environment / "python", [])


def test_lines_that_choose_no_python_are_not_run(tmp_path: Path) -> None:
    assert find_python(lines("export A=$(touch ran)", "ulimit -n 100"), "python", tmp_path) == (None, [])
    assert not (tmp_path / "ran").exists()
