"""New code for a run (`hpc resume --new-code`): what the run has written stays, and a kill loses nothing."""

import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.events import script_spec

from hpc.base.errors import UserError
from hpc.run.code_files import CodeFiles
from hpc.run.rundir import RunDir
from hpc.submissions.user_code.code_copy import copy_code, prepare_code, replace_code, restore_code
from hpc.submissions.user_code.own_code import find_code


def git(directory: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=directory, check=True, capture_output=True)


def write(directory: Path, **files: str) -> None:
    for name, text in files.items():
        path = directory / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def texts(directory: Path) -> dict[str, str]:
    """The texts of all files below a directory, those behind links too, without our packages."""
    found = {}
    for path in sorted(directory.rglob("*")):
        below = path.relative_to(directory)
        if below.parts[0] == ".torchrelay":
            continue
        if path.is_symlink() and path.is_dir():
            found |= {f"{below}/{name}": text for name, text in texts(path).items()}
        elif path.is_file():
            found[str(below)] = path.read_text()
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a tracked script, a tracked module, a configuration, and ignored data."""
    project = tmp_path / "project"
    files = {"train_py": "old", "gone_py": "old", "conf_yaml": "old", "data__a_csv": "a", "_gitignore": "data/\nout*\n"}
    write(project, **files)
    git(project, "init", "-q")
    git(project, "add", "train.py", "gone.py", ".gitignore")
    monkeypatch.chdir(project)
    return project


@pytest.fixture
def run(here: Path, tmp_path: Path) -> RunDir:
    """A run of this code."""
    made = RunDir(tmp_path / "runs/run")
    made.path.mkdir(parents=True)
    copy_code(made, find_code(here, ("train.py",)))
    return made


def renew(run: RunDir, *, fails: bool = False) -> list[str]:
    """Replace the code as `hpc resume` does. Returns the names of the files that gave way."""
    spec = replace(script_spec("train.py"), working_directory=".")
    with ExitStack() as cleanup, ExitStack() as undo:
        new = prepare_code(run, spec, cleanup)
        replace_code(run, new, 1, undo)
        if not fails:
            undo.pop_all()
            shutil.rmtree(run.previous_code)
    return list(new.replaced)


def test_code_is_replaced_and_what_the_run_wrote_stays(here: Path, run: RunDir) -> None:
    write(run.code, checkpoints__last_pt="50", log_txt="log", deep__a__b_txt="b")
    (run.code / "empty").mkdir()
    (run.code / "latest").symlink_to("checkpoints")
    write(here, train_py="new", added_py="new", data__b_csv="b")
    (here / "gone.py").unlink()
    assert renew(run) == []
    found = texts(run.code)
    assert {name: text for name, text in found.items() if not name.startswith("latest")} == {
        "train.py": "new", "added.py": "new", "conf.yaml": "old", ".gitignore": "data/\nout*\n", "data/a.csv": "a",
        "data/b.csv": "b", "checkpoints/last.pt": "50", "log.txt": "log", "deep/a/b.txt": "b",
    }  # fmt: skip
    assert (run.code / "latest/last.pt").read_text() == "50"
    assert (run.code / "empty").is_dir()
    assert [path.name for path in run.path.iterdir()] == ["code"]
    write(run.code, log_txt="more")
    assert renew(run) == []
    assert texts(run.code)["log.txt"] == "more", "once more"


def test_where_both_have_a_file_neither_is_lost(here: Path, run: RunDir) -> None:
    write(run.code, train_py="of the run", conf_yaml="of the run", state_json="of the run", model_py="of the run")
    write(run.code, out__x_txt="of the run", outfile="of the run")
    write(here, train_py="new", state_json="of the user", model_py="new", out__x_txt="of the user", out__y_txt="y")
    write(here, outfile__z_txt="of the user")
    git(here, "add", "model.py")
    assert renew(run) == ["model.py", "train.py"]
    found = texts(run.code)
    assert (found["train.py"], found["model.py"]) == ("new", "new"), "git tracks them"
    assert found["conf.yaml"] == "of the run", "the user has not changed it"
    assert found["state.json"] == "of the run", "it is no code of the user's"
    assert (found["out/x.txt"], found["out/y.txt"], found["outfile"]) == ("of the run", "y", "of the run")
    assert texts(run.replaced_files(1)) == {"train.py": "of the run", "model.py": "of the run"}
    assert (here / "out/x.txt").read_text() == "of the user"
    write(run.code, conf_yaml="of the run")
    write(here, conf_yaml="of the user, later")
    assert renew(run) == ["conf.yaml"]
    assert texts(run.replaced_files(2)) == {"conf.yaml": "of the run"}


def test_files_and_directories_may_change_places(here: Path, run: RunDir) -> None:
    write(run.code, lib="of the run", pkg__a_txt="of the run")
    (run.code / "data").unlink()
    write(run.code, data__own_csv="of the run")
    write(here, lib__a_py="new", pkg="new")
    git(here, "add", "lib/a.py", "pkg")
    git(here, "add", "-f", "data/a.csv")
    assert renew(run) == ["lib", "pkg/a.txt"]
    found = texts(run.code)
    assert (found["lib/a.py"], found["pkg"]) == ("new", "new")
    assert (found["data/own.csv"], found["data/a.csv"]) == ("of the run", "a")
    assert not (run.code / "data/a.csv").is_symlink(), "git tracks it now"


def test_code_without_a_record_loses_nothing(here: Path, run: RunDir) -> None:
    (run.packages.parent / "files.json").unlink()
    (run.code / "data").unlink()
    write(run.code, checkpoints__last_pt="50")
    write(here, train_py="new")
    assert renew(run) == ["train.py"]
    assert texts(run.replaced_files(1)) == {"train.py": "old"}
    assert (texts(run.code)["train.py"], texts(run.code)["checkpoints/last.pt"]) == ("new", "50")
    assert texts(run.code)["data/a.csv"] == "a"


def test_a_resumption_that_fails_or_is_killed_changes_nothing(here: Path, run: RunDir) -> None:
    write(run.code, log_txt="log", train_py="of the run")
    before = texts(run.code)
    write(here, train_py="new")
    renew(run, fails=True)
    assert texts(run.code) == before
    assert [path.name for path in run.path.iterdir()] == ["code"]
    run.code.rename(run.previous_code)  # a kill between the two renames
    restore_code(run)
    assert texts(run.code) == before
    shutil.copytree(run.code, run.previous_code, symlinks=True)  # a kill after them
    restore_code(run)
    assert renew(run) == ["train.py"]
    assert {path.name for path in run.path.iterdir()} == {"code", run.replaced_files(1).name}


def test_the_root_of_the_code_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, run = tmp_path / "project", RunDir(tmp_path / "runs/run")
    write(here, train_py="open('../data/a.csv')", data__x="")
    write(tmp_path, data__a_csv="a")
    run.path.mkdir(parents=True)
    copy_code(run, find_code(here, ("train.py",)))
    write(run.code, project__last_pt="50")
    write(here, train_py="pass")
    monkeypatch.chdir(here)
    spec = replace(script_spec("train.py"), working_directory="project")
    with ExitStack() as cleanup:
        new = prepare_code(run, spec, cleanup)
        assert new.code.working_directory == "project"
        assert (new.run.code / "project/last.pt").read_text() == "50"
        record = CodeFiles.load(new.run.code)
        assert record
        assert (record.root, record.top) == (str(tmp_path), "project")
    monkeypatch.chdir(tmp_path)
    with ExitStack() as cleanup, pytest.raises(UserError, match=f"starts in {here}: type hpc resume there"):
        prepare_code(run, spec, cleanup)
