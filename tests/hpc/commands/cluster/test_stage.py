"""`hpc stage` as it is typed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.cluster import hpc


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "photos"
    path.mkdir()
    (path / "1.jpg").write_bytes(os.urandom(1000))
    return path


@pytest.fixture
def here(tmp_path: Path) -> str:
    (tmp_path / "disk").mkdir()
    return f"--stage-dir={tmp_path / 'disk'}"


def answer(*arguments: str, code: int = 0) -> Any:
    done = hpc("stage", *arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_copy_list_verify_clean(source: Path, here: str) -> None:
    copy = answer(str(source), here)
    assert (Path(copy["path"]) / "1.jpg").read_bytes() == (source / "1.jpg").read_bytes()
    assert "(reused)" in hpc("stage", str(source), here).stdout
    [known] = answer("--list", here)
    assert (known["source"], known["files"], known["bytes"], known["in_use"]) == (str(source), 1, 1000, False)
    assert "photos" in hpc("stage", "--list", here).stdout
    assert hpc("stage", "--verify", here).stdout == f"{source}: intact\n"
    (Path(copy["path"]) / "1.jpg").write_bytes(bytes(1000))
    [check] = answer("--verify", str(source), here, code=1)
    assert (check["damaged"], check["result"]) == (["1.jpg"], "repaired")
    assert hpc("stage", "--verify", here).stdout == f"{source}: intact\n"
    assert len(answer("--clean", here)["deleted"]) == 1
    assert answer("--list", here) == []
    assert "you have no copies" in hpc("stage", "--list", here).stdout


@pytest.mark.parametrize("fate", ["changed", "gone"])
def test_damaged_copy_that_cannot_be_repaired_is_deleted(source: Path, here: str, fate: str) -> None:
    copy = answer(str(source), here)
    (Path(copy["path"]) / "1.jpg").write_bytes(bytes(1000))
    (source / "1.jpg").unlink()
    (source / "2.jpg").write_bytes(b"another") if fate == "changed" else source.rmdir()
    done = hpc("stage", "--verify", here)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{source}: damaged: 1.jpg; deleted: its source is gone or has changed")
    assert answer("--list", here) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to copy: give a directory or an archive"),
        (("--list", "--clean"), "give only one of them"),
        (("/nowhere",), "/nowhere does not exist on this node"),
        (("--verify", "/nowhere"), "has no copy of /nowhere"),
        (("--list", "--stage-dir=/nowhere"), "/nowhere"),
    ],
)
def test_mistakes_are_one_line(here: str, arguments: tuple[str, ...], message: str) -> None:
    done = hpc("stage", here, *arguments)
    assert done.returncode != 0
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
