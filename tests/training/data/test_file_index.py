"""An image folder's file index: the cached one is used while it is valid, and built again when it is not."""

import os
import pickle
import shutil
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from support.trainings import make_folder

from hpc.base.errors import UserError
from training.config.dataset_layout import check_data
from training.data.file_index import FileIndex, build_index, deserialize, load_or_build_index, serialize

LATER = 10 * 10**9


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "data", per_class=2)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "run" / "index.npz"


def find(data: Path, cache: Path, later: int = LATER) -> FileIndex:
    """The index as of `later` nanoseconds from now."""
    return deserialize(load_or_build_index(check_data(data), cache, time.time_ns() + later))


def names(index: FileIndex, part: str = "train") -> list[bytes]:
    return list(index.parts[part].names.tolist())


def plant(cache: Path) -> None:
    """Change the cached index so that it differs from a new one."""
    with np.load(cache) as arrays:
        planted = dict(arrays) | {"classes": np.array([b"planted"])}
    np.savez(cache, **planted)


def test_the_cached_index_is_used_while_no_class_directory_changes(data: Path, cache: Path) -> None:
    find(data, cache)
    plant(cache)
    (data / "train" / "green" / "0.jpg").write_bytes(b"another content")
    assert find(data, cache).classes == ("planted",)


CHANGES: dict[str, Callable[[Path], object]] = {
    "an added image": lambda data: (data / "train" / "green" / "new.jpg").touch(),
    "a removed image": lambda data: (data / "train" / "green" / "0.jpg").unlink(),
    "a new class": lambda data: (data / "train" / "violet").mkdir(),
    "a renamed class": lambda data: [(part / "red").rename(part / "pink") for part in data.iterdir()],
    "another directory": lambda data: (data / "test").rename(data / "not-a-test"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_index_is_built_again_after_a_change(data: Path, cache: Path, change: Callable[[Path], object]) -> None:
    find(data, cache)
    plant(cache)
    change(data)
    expected = serialize(build_index(check_data(data)))
    assert serialize(find(data, cache)) == expected
    assert serialize(find(data, cache)) == expected


def test_a_change_whose_time_was_set_back_is_noticed(data: Path, cache: Path) -> None:
    find(data, cache)
    directory = data / "train" / "green"
    before = directory.stat()
    (directory / "new.jpg").touch()
    os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert b"green/new.jpg" in names(find(data, cache))


def test_the_same_names_in_another_place_are_other_data(data: Path, cache: Path, tmp_path: Path) -> None:
    find(data, cache)
    plant(cache)
    data.rename(tmp_path / "moved")
    assert find(tmp_path / "moved", cache).classes == ("blue sky", "green", "red")


def test_an_index_of_directories_that_have_just_changed_is_not_cached(data: Path, cache: Path) -> None:
    find(data, cache, later=0)
    assert not cache.exists()


def pickled() -> bytes:
    buffer = BytesIO()
    np.savez(buffer, fingerprint=np.array([{}], dtype=object))
    return buffer.getvalue()


@pytest.mark.parametrize("content", [b"", b"foreign", pickle.dumps({}), pickled(), "torn", "damaged"])
def test_a_torn_or_foreign_cache_is_replaced(data: Path, cache: Path, content: bytes | str) -> None:
    expected = serialize(find(data, cache))
    whole = cache.read_bytes()
    middle = len(whole) // 2
    spoiled = {"torn": whole[:middle], "damaged": whole.replace(b"green", b"grown", 1)}
    cache.write_bytes(spoiled[content] if isinstance(content, str) else content)
    assert serialize(find(data, cache)) == expected
    assert cache.read_bytes() == whole


def test_an_index_that_cannot_be_written_costs_a_warning(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").touch()
    assert len(names(find(data, tmp_path / "full" / "index.npz"))) == 6
    assert capsys.readouterr().out.startswith(f"warning: {tmp_path / 'full' / 'index.npz'} cannot be written (")


def test_a_directory_that_cannot_be_listed_is_named(data: Path, cache: Path) -> None:
    layout = check_data(data)
    shutil.rmtree(data / "val")
    with pytest.raises(UserError, match=rf"{data / 'val'} cannot be listed \(No such file or directory\)"):
        load_or_build_index(layout, cache, time.time_ns())
