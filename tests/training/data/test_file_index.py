"""The list of an image folder's images: kept while it is right, made anew when it is not."""

import os
import pickle
import shutil
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from trainer_rig import Starter, make_folder

from hpc.core.errors import UserError
from training.config.dataset_layout import check_data
from training.data.file_index import FileIndex, build_index, deserialize, load_or_build_index, serialize

LATER = 10 * 10**9


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "data", per_class=2)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "run" / "index.npz"


def find(data: Path, kept: Path, later: int = LATER) -> FileIndex:
    """As if so many nanoseconds had gone by."""
    return deserialize(load_or_build_index(check_data(data), kept, time.time_ns() + later))


def names(listing: FileIndex, part: str = "train") -> list[bytes]:
    return list(listing.parts[part].names.tolist())


def plant(kept: Path) -> None:
    """Change what is kept so that it can be told from a new listing."""
    with np.load(kept) as arrays:
        planted = dict(arrays) | {"classes": np.array([b"planted"])}
    np.savez(kept, **planted)


def test_all_images_are_listed_by_class(data: Path, kept: Path) -> None:
    (data / "val" / "green" / "notes.txt").touch()
    (data / "val" / "green" / ".hidden.jpg").touch()
    (data / "train" / "green" / os.fsdecode(b"caf\xe9.jpg")).touch()
    listing = find(data, kept)
    assert listing.classes == ("blue sky", "green", "red")
    assert names(listing, "val") == [
        f"{label}/{name}".encode() for label in listing.classes for name in ("0.jpg", "1.png")
    ]
    assert listing.parts["val"].labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert names(listing)[4] == b"green/caf\xe9.jpg"
    assert listing.parts.keys() == {"train", "val", "test"}


def test_a_listing_survives_being_packed(data: Path) -> None:
    listing = build_index(check_data(data))
    again = deserialize(serialize(listing))
    assert again.classes == listing.classes
    for name, part in listing.parts.items():
        assert np.array_equal(again.parts[name].names, part.names)
        assert np.array_equal(again.parts[name].labels, part.labels)


def test_what_is_kept_is_used_while_no_class_directory_changes(data: Path, kept: Path) -> None:
    find(data, kept)
    plant(kept)
    (data / "train" / "green" / "0.jpg").write_bytes(b"another content")
    assert find(data, kept).classes == ("planted",)


CHANGES: dict[str, Callable[[Path], object]] = {
    "an added image": lambda data: (data / "train" / "green" / "new.jpg").touch(),
    "an added image of val": lambda data: (data / "val" / "green" / "new.jpg").touch(),
    "a removed image": lambda data: (data / "train" / "green" / "0.jpg").unlink(),
    "a renamed image": lambda data: (data / "train" / "green" / "0.jpg").rename(data / "train" / "green" / "9.jpg"),
    "a new class": lambda data: (data / "train" / "violet").mkdir(),
    "a renamed class": lambda data: [(part / "red").rename(part / "pink") for part in data.iterdir()],
    "another directory": lambda data: (data / "test").rename(data / "not-a-test"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_kept_is_made_anew_after_a_change(data: Path, kept: Path, change: Callable[[Path], object]) -> None:
    find(data, kept)
    plant(kept)
    change(data)
    expected = serialize(build_index(check_data(data)))
    assert serialize(find(data, kept)) == expected
    assert serialize(find(data, kept)) == expected


def test_a_change_whose_time_was_set_back_is_noticed(data: Path, kept: Path) -> None:
    find(data, kept)
    directory = data / "train" / "green"
    before = directory.stat()
    (directory / "new.jpg").touch()
    os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert b"green/new.jpg" in names(find(data, kept))


def test_the_same_names_in_another_place_are_other_data(data: Path, kept: Path, tmp_path: Path) -> None:
    find(data, kept)
    plant(kept)
    data.rename(tmp_path / "moved")
    assert find(tmp_path / "moved", kept).classes == ("blue sky", "green", "red")


def test_a_listing_of_directories_that_are_just_being_filled_is_not_kept(data: Path, kept: Path) -> None:
    find(data, kept, later=0)
    assert not kept.exists()


def pickled() -> bytes:
    buffer = BytesIO()
    np.savez(buffer, state=np.array([{}], dtype=object))
    return buffer.getvalue()


@pytest.mark.parametrize("content", [b"", b"foreign", pickle.dumps({}), pickled(), "torn", "damaged"])
def test_what_is_torn_or_foreign_is_replaced(data: Path, kept: Path, content: bytes | str) -> None:
    expected = serialize(find(data, kept))
    whole = kept.read_bytes()
    middle = len(whole) // 2
    spoiled = {"torn": whole[:middle], "damaged": whole.replace(b"green", b"grown", 1)}
    kept.write_bytes(spoiled[content] if isinstance(content, str) else content)
    assert serialize(find(data, kept)) == expected
    assert kept.read_bytes() == whole


def test_a_listing_that_cannot_be_written_costs_a_warning(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").touch()
    assert len(names(find(data, tmp_path / "full" / "index.npz"))) == 6
    assert capsys.readouterr().out.startswith(f"warning: {tmp_path / 'full' / 'index.npz'} cannot be written (")


def test_a_directory_that_cannot_be_listed_is_named(data: Path, kept: Path) -> None:
    layout = check_data(data)
    shutil.rmtree(data / "val")
    with pytest.raises(UserError, match=rf"{data / 'val'} cannot be listed \(No such file or directory\)"):
        load_or_build_index(layout, kept, time.time_ns())


def test_the_other_ranks_need_the_images_too(start: Starter, folder_data: Path, tmp_path: Path) -> None:
    training = start(world_size=2, data=[folder_data, tmp_path / "not-staged"])
    assert training.wait() == [2, 2]
    complaints = [line for line in training.output().splitlines() if line.startswith("error: ")]
    lost = f"--data is {tmp_path}/not-staged, which does not exist"
    assert complaints == [f"error: rank 1: {lost}: give a directory, or fashion-mnist"]
