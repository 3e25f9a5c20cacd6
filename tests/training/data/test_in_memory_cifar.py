"""CIFAR's Python files: what is in them, and that reading them runs nothing of them."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from support.trainings import load, make_cifar, pickled_as_published

from hpc.base.errors import UserError
from training.config.dataset_layout import check_data
from training.data.batch_schedule import BatchRequest
from training.data.in_memory import read_cifar


@pytest.mark.parametrize(("kind", "train"), [("cifar10", 150), ("cifar100", 30)])
def test_cifar_is_recognised_by_its_files_and_read_with_its_names(tmp_path: Path, kind: str, train: int) -> None:
    path = make_cifar(tmp_path / "copied-to-a-node", kind)
    layout = check_data(path)
    assert (layout.kind, layout.path, layout.val, layout.test) == (kind, path, None, path)
    data = load(path, val_split=0.0)
    assert data.test is not None
    assert (len(data.train), len(data.test), data.classes) == (train, 30, ("frog", "ship", "truck"))
    assert (data.channels, data.size) == (3, 32)
    assert data.train.labels.tolist() == [number % 3 for number in range(30)] * (train // 30)
    pixels = np.random.default_rng(3).integers(0, 256, (30, 3, 32, 32))
    assert data.train[BatchRequest(indices=tuple(range(30)), epoch=None)].images.tolist() == pixels.tolist()


@pytest.mark.parametrize("protocol", [3, 4])
def test_files_that_were_pickled_anew_by_todays_numpy_are_read_too(tmp_path: Path, protocol: int) -> None:
    path = make_cifar(tmp_path / "data", "cifar100")
    images, _ = read_cifar(path, "cifar100", "train", 3)
    content = {"data": images.reshape(-1, 3072).numpy(), "fine_labels": [0] * len(images)}
    (path / "train").write_bytes(pickle.dumps(content, protocol))
    again, labels = read_cifar(path, "cifar100", "train", 3)
    assert torch.equal(images, again)
    assert labels.unique().tolist() == [0]


def test_the_directory_above_stands_for_the_only_data_set_in_it(tmp_path: Path) -> None:
    one = make_cifar(tmp_path / "cifar-10-batches-py")
    assert (check_data(tmp_path).kind, check_data(tmp_path).path) == ("cifar10", one)
    two = make_cifar(tmp_path / "cifar-100-python", "cifar100")
    with pytest.raises(UserError, match=f"has {one} and {two}: give one of them"):
        check_data(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    path = make_cifar(tmp_path / "cifar-10-batches-py")
    for name in ("data_batch_1", "test_batch"):
        (path / name).unlink()
    with pytest.raises(UserError, match=f"{path} lacks data_batch_1, test_batch: add them"):
        check_data(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no pickle", r"cannot be read \("),
        (pickle.dumps([1, 2]), r"cannot be read \("),
        (pickled_as_published({"data": np.zeros((1, 3072)), "labels": [0]}), "has no images of 32 x 32 pixels"),
        (pickled_as_published({"data": np.zeros((1, 3072), np.uint8), "labels": [3]}), "has no labels from 0 to 2"),
        (pickled_as_published({"data": np.zeros((1, 3072), np.uint8), "labels": [0, 1]}), "has 1 images and 2 labels"),
    ],
)
def test_a_file_that_is_torn_or_something_else_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = make_cifar(tmp_path / "data")
    (path / "test_batch").write_bytes(content)
    with pytest.raises(UserError, match=f"{path / 'test_batch'} {reason}.*: copy the data again"):
        load(path)
    (path / "batches.meta").write_bytes(pickled_as_published({"label_names": []}))
    with pytest.raises(UserError, match=f"{path / 'batches.meta'} has no label_names"):
        load(path)


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("builtins", "eval"), ("numpy", "load"), ("numpy", "ndarray.tofile"), ("copyreg", "__newobj__")],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_file_runs_no_code(tmp_path: Path, module: str, name: str, protocol: int) -> None:
    path, harm = make_cifar(tmp_path / "data"), tmp_path / "harm"
    text = f"touch {harm}".encode()
    named = (module.encode(), name.encode())
    if protocol == 2:
        function = b"c" + b"\n".join(named) + b"\n"
    else:
        function = b"".join(b"\x8c" + bytes([len(word)]) + word for word in named) + b"\x93"
    call = b"\x80" + bytes([protocol]) + function + b"(U" + bytes([len(text)]) + text + b"tR."
    (path / "data_batch_1").write_bytes(call)
    with pytest.raises(
        UserError, match=rf"data_batch_1 cannot be read \(it calls {module}\.{name}, which is not allowed\)"
    ):
        load(path)
    assert not harm.exists()
