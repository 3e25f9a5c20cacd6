"""Which entries of a directory are copied, linked or left out, and the bounds that keep the choice quick."""

import os
from pathlib import Path

import pytest

from hpc.base.errors import UserError
from hpc.submissions.user_code import code_layout
from hpc.submissions.user_code.code_layout import exclusion, find_sources, lay_out


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def everything(_: os.DirEntry[str]) -> bool:
    return False


def test_a_crowded_directory_is_one_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "train.py", "images/prepare.py", *(f"images/{number}.bin" for number in range(5)))
    monkeypatch.setattr(code_layout, "_MOST_LINKS", 5)
    layout = lay_out(tmp_path, {"train.py", "images/prepare.py"}, everything)
    assert (layout.copies, layout.links, layout.crowded) == (("train.py",), ("images",), ("images",))
    with pytest.raises(UserError, match=r"images has more than 5 entries, .* or submit with --in-place"):
        lay_out(tmp_path, {"images/prepare.py"}, everything, made=["images"])


def test_tools_environments_and_runs_are_left_out(tmp_path: Path) -> None:
    out = ["env/pyvenv.cfg", "conda/conda-meta/history", "x/__pycache__/a", ".git/HEAD", "my-runs/a", "old/spec.json"]
    touch(tmp_path, "train.py", "x/y.py", "old/events/a", "model/spec.json", ".hidden", *out)
    layout = lay_out(tmp_path, {"train.py", "x/y.py"}, exclusion(tmp_path / "my-runs"))
    assert layout.links == (".hidden", "model")


def small(root: Path) -> set[str]:
    return set(find_sources(root, everything).small)


def test_sources_and_configurations_are_code_and_results_are_not(tmp_path: Path) -> None:
    code = {"train.py", "go.sh", "run.json", "conf/model/small.yaml", "lib/a.py", "lib/a.yaml", "csrc/k.cu"}
    touch(tmp_path, *code, "out/1/params.yaml", "data/labels.json", "notes.txt", "lib/b.bin", ".cache/x.py")
    (tmp_path / "large.py").write_bytes(bytes(2**20 + 1))
    (tmp_path / "linked").symlink_to("lib")
    assert small(tmp_path) == code


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("_MOST_IN_DIRECTORY", 3, {"train.py", "a/x.py", "a/b/c/y.py"}),
        ("_MOST_ENTRIES", 3, {"train.py"}),
        ("_MOST_BYTES", 0, {"train.py"}),
    ],
)
def test_the_search_is_bounded(
    name: str, value: int, found: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond some bounds, the directory is not that of a project, and only its own files are copied."""
    touch(tmp_path, "train.py", "a/x.py", "a/b/c/y.py", *(f"many/{number}.py" for number in range(4)))
    (tmp_path / "many/2.py").write_text("1")
    monkeypatch.setattr(code_layout, name, value)
    assert small(tmp_path) == found
