"""The images of a folder are those of torchvision's ImageFolder, without what file managers leave behind."""

import os
import re
import shutil
from pathlib import Path

import pytest
from support.trainings import make_folder
from torchvision.datasets import ImageFolder

from hpc.base.errors import UserError
from training.config.dataset_layout import check_classes, check_data, find_data
from training.data.file_index import build_index

LEFT_BEHIND = (
    *("__MACOSX/data/train/green/._0.jpg", "__MACOSX/._data", ".DS_Store", "train/.DS_Store", "train/green/.DS_Store"),
    *("Thumbs.db", "train/Thumbs.db", "train/green/thumbs.db", "desktop.ini", "train/red/Desktop.ini", "Icon\r"),
    *("train/@eaDir/red/0.jpg", "train/green/@eaDir/0.jpg/SYNOPHOTO_THUMB_M.jpg", "lost+found/0.jpg"),
    *("train/.ipynb_checkpoints/0.jpg", "val/red/._1.png", "$RECYCLE.BIN/x/0.jpg", "#recycle/a/0.jpg", ".git/x/0.jpg"),
    *("System Volume Information/a/0.jpg", "val/__MACOSX/red/0.jpg", "train/#snapshot/red/0.jpg", ".Trash-1/a/0.jpg"),
)


def leave_behind(directory: Path, names: tuple[str, ...] = LEFT_BEHIND) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"\0\5\x16\7")


def images(data: Path) -> dict[str, list[bytes]]:
    layout = check_data(data)
    assert check_classes(layout) == []
    index = build_index(layout)
    assert index.classes == ("blue sky", "green", "red")
    return {name: part.names.tolist() for name, part in index.parts.items()}


def test_what_file_managers_leave_behind_is_ignored(tmp_path: Path) -> None:
    parts = make_folder(tmp_path / "parts", per_class=2)
    expected = images(parts)
    leave_behind(parts)
    assert images(parts) == expected
    classes = make_folder(tmp_path / "classes", parts=(".",), per_class=2)
    leave_behind(classes, tuple(name.removeprefix("train/") for name in LEFT_BEHIND if not name.startswith("val/")))
    assert images(classes) == {"train": expected["train"]}


@pytest.mark.parametrize("around", ["data", "data/data"])
@pytest.mark.parametrize("parts", [("train", "val"), (".",)])
def test_the_data_may_be_in_one_directory_of_an_archive(tmp_path: Path, parts: tuple[str, ...], around: str) -> None:
    data = make_folder(tmp_path / around, parts=parts, per_class=2)
    leave_behind(tmp_path, tuple(name for name in LEFT_BEHIND if not name.startswith(("train/", "val/"))))
    (tmp_path / "README.txt").touch()
    assert find_data(tmp_path) == data
    assert check_data(tmp_path) == check_data(data)


@pytest.mark.parametrize("parts", [("train", "val", "test"), ("Training", "Testing"), (".",)])
@pytest.mark.parametrize("around", [".", "data"])
def test_stray_images_make_no_other_classes(tmp_path: Path, parts: tuple[str, ...], around: str) -> None:
    data = make_folder(tmp_path / around, parts=parts, per_class=2)
    expected = images(data)
    for directory in {data, *(data / part for part in parts)}:
        (directory / "stray.png").touch()
    assert images(tmp_path) == expected
    assert len(expected) == len(parts)


@pytest.mark.parametrize("parts", [("train", "test"), ("val", "test"), ("train/train", "test/test")])
def test_parts_are_not_taken_for_classes(tmp_path: Path, parts: tuple[str, ...]) -> None:
    for part in parts:
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "0.png").touch()
    with pytest.raises(UserError, match="there are no images in class directories below"):
        check_data(tmp_path)


def test_images_that_no_part_uses_are_told(tmp_path: Path) -> None:
    data = make_folder(tmp_path, parts=("train", "val"), per_class=2)
    for name in ("test/0.png", "more/violet/0.png", "docs/notes.txt"):
        (data / name).parent.mkdir(parents=True)
        (data / name).touch()
    more, test = check_classes(check_data(data))
    assert (more, test) == tuple(
        f"the images in {data / name} are not used: put them in class directories of train/, val/ or test/, "
        "or remove them"
        for name in ("more", "test")
    )


def test_images_below_a_class_directory_are_its_own_as_in_image_folder(tmp_path: Path) -> None:
    data = make_folder(tmp_path / "data", parts=(".",), per_class=4)
    deep = data / "red" / "a" / "b.jpg"  # a directory
    deep.mkdir(parents=True)
    for number, place in enumerate((deep, deep.parent, data / "red" / "z"), 1):
        place.mkdir(exist_ok=True)
        shutil.move(data / "red" / f"{number}.{'png' if number % 2 else 'jpg'}", place)
    (data / "green").rename(tmp_path / "elsewhere")
    (data / "green").mkdir()
    (data / "green" / "linked").symlink_to(tmp_path / "elsewhere")
    index, reference = build_index(check_data(data)), ImageFolder(str(data))
    assert index.classes == tuple(reference.classes)
    found = zip(index.parts["train"].names.tolist(), index.parts["train"].labels.tolist(), strict=True)
    expected = [(os.path.relpath(path, data).encode(), label) for path, label in reference.samples]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("part", ["val", "test"])
def test_a_class_that_only_another_part_has_is_refused(tmp_path: Path, part: str) -> None:
    data = make_folder(tmp_path / "data", per_class=1)
    (data / part / "violet").mkdir()
    message = f"{data / part / 'violet'} is a class that the training set does not have: remove it, or add it to {data}"
    with pytest.raises(UserError, match=re.escape(message)):
        check_classes(check_data(data))
