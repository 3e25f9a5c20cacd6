"""What a script misses that the user's directory has: the run that fails for it says what to type."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.events import script_spec

from hpc.run.rundir import RunDir
from hpc.submissions.user_code.code_copy import copy_files
from hpc.submissions.user_code.own_code import find_code
from jobs.ranks.left_out_files import find_left_out


@pytest.fixture
def explain(tmp_path: Path) -> Callable[[str], str | None]:
    """A run that was submitted in scripts/, without git; what is below was there, or came later."""
    here, run = tmp_path / "project/scripts", RunDir(tmp_path / "runs/run")
    for name in ("train.py", "was/there.csv", "env/pyvenv.cfg", "../lib/model.py", "../data/a.csv"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    run.path.mkdir(parents=True)
    copy_files(find_code(here, ("train.py",)), run.code)
    for name in ("came/later.csv", "pkg/late.py", "ext.cpython-311.so"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    return lambda detail: find_left_out(run, script_spec("train.py"), detail.replace("CODE", str(run.code)))


@pytest.mark.parametrize(
    ("detail", "name", "advice"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: './came/later.csv'", "came/later.csv", "--new-code"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'CODE/came'", "came", "--new-code"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'env/pyvenv.cfg'", "env", "--in-place"),
        ("ModuleNotFoundError: No module named 'pkg.late'", "pkg/late.py", "hpc resume run --new-code; else"),
        ("ModuleNotFoundError: No module named 'ext'", "ext.cpython-311.so", "--new-code"),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '../data/a.csv'",
            "../data/a.csv",
            "an absolute path",
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'CODE/../data/a.csv'", "../data/a.csv", "--in-place"),
        ("ModuleNotFoundError: No module named 'lib'", "../lib", "or submit with --in-place"),
    ],
)
def test_what_exists_is_named(
    detail: str, name: str, advice: str, explain: Callable[[str], str | None], tmp_path: Path
) -> None:
    said = explain(detail)
    assert said
    assert str((tmp_path / "project/scripts" / name).resolve()) in said
    assert advice in said


@pytest.mark.parametrize(
    "detail",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.csv'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'was/there.csv'",
        f"FileNotFoundError: the file isn't there: {'x' * 300}, and I don't know why",
        "ModuleNotFoundError: No module named '/home/me/configs/base'",
        f"ModuleNotFoundError: No module named '{'x' * 300}'",
        "ValueError: 'came/later.csv' is empty",
        "",
    ],
)
def test_other_failures_are_left_to_the_budget(detail: str, explain: Callable[[str], str | None]) -> None:
    assert explain(detail) is None


def test_a_run_in_place_or_of_an_earlier_version_has_nothing_left_out(tmp_path: Path) -> None:
    detail, run = "FileNotFoundError: [Errno 2] No such file or directory: 'a'", RunDir(tmp_path)
    (tmp_path / "a").touch()
    shutil.rmtree(run.code, ignore_errors=True)
    assert find_left_out(run, script_spec("train.py"), detail) is None
    assert find_left_out(run, replace(script_spec("train.py"), in_place=str(tmp_path)), detail) is None
