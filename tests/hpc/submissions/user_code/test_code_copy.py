"""A run's `code/` on disk: nobody else can write to it, and no command follows its links."""

from pathlib import Path

import pytest

from hpc.base.files import new_directory, remove_directory
from hpc.commands.runs.clean import remove
from hpc.run.code_files import CodeFiles, written_files
from hpc.submissions.user_code.code_copy import copy_files
from hpc.submissions.user_code.own_code import UserCode, find_code


def users_directory(path: Path) -> UserCode:
    (path / "data/deep").mkdir(parents=True)
    (path / "data/deep/a.csv").write_text("precious")
    (path / "train.py").write_text("")
    for each in (path / "data", path / "data/deep", path / "train.py"):
        each.chmod(0o777)
    (path / "data/deep/a.csv").chmod(0o666)
    return find_code(path, ("train.py",))


def modes(path: Path) -> dict[str, int]:
    return {str(each): each.stat().st_mode & 0o777 for each in (path, *path.rglob("*"))}


def test_others_can_change_no_copy_and_the_users_files_keep_their_modes(tmp_path: Path) -> None:
    code = users_directory(tmp_path / "project")
    before = modes(tmp_path / "project")
    copy_files(code, tmp_path / "code")
    assert modes(tmp_path / "project") == before
    own = [path for path in (tmp_path / "code").rglob("*") if not path.is_symlink()]
    assert own
    assert not [path for path in own if path.stat().st_mode & 0o022]


def test_a_run_is_removed_without_what_its_links_lead_to(tmp_path: Path) -> None:
    code = users_directory(tmp_path / "project")
    before = modes(tmp_path / "project")

    def failing(path: Path) -> None:
        with pytest.raises(ZeroDivisionError), new_directory(path) as draft:  # noqa: PT012
            copy_files(code, draft / "code")
            1 // 0  # noqa: B018 - a failure of the submission

    def made(path: Path) -> Path:
        path.mkdir()
        copy_files(code, path / "code")
        return path

    remove(made(tmp_path / "cleaned"))
    remove_directory(made(tmp_path / "refused"))
    failing(tmp_path / "failed")
    assert [path.name for path in tmp_path.iterdir()] == ["project"]
    assert modes(tmp_path / "project") == before
    assert (tmp_path / "project/data/deep/a.csv").read_text() == "precious"


def test_a_copy_of_a_copy_is_the_same(tmp_path: Path) -> None:
    code = users_directory(tmp_path / "project")
    copy_files(code, tmp_path / "group")
    member = UserCode(
        root=tmp_path / "group", top=tmp_path / "group", script=("train.py",), copied_from=tmp_path / "group"
    )
    copy_files(member, tmp_path / "code")
    assert (tmp_path / "code/data").readlink() == tmp_path / "project/data"
    record = CodeFiles.load(tmp_path / "code")
    assert record
    assert record.root == str(tmp_path / "project")
    assert not list(written_files(tmp_path / "code", record))


def test_what_a_script_writes_is_known(tmp_path: Path) -> None:
    code = users_directory(tmp_path / "project")
    copy_files(code, run := tmp_path / "code")
    (run / "data/deep/through.csv").write_text("lands where torchrun would put it")
    for name in ("out/a/1.pt", "out/a/2.pt", "log.txt"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("")
    (run / "train.py").write_text("changed")
    (run / "empty").mkdir()
    (run / "__pycache__").mkdir()
    (run / "__pycache__/train.pyc").touch()
    (run / "latest").symlink_to("out")
    found = set(written_files(run, CodeFiles.load(run)))
    assert found == {"out/a/1.pt", "out/a/2.pt", "log.txt", "train.py", "empty/", "latest"}
    assert (tmp_path / "project/data/deep/through.csv").exists()
