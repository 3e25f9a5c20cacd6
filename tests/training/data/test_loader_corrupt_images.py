"""Images that cannot be read: a corrupt one is replaced, the same everywhere; a node's own trouble is an error."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import simplejpeg
import torch
from support.trainings import load, make_folder

from hpc.base.errors import UserError
from training.data.batch_schedule import BatchRequest
from training.data.loader import Batch, ImageSource

NO_IMAGES = {"truncated": None, "empty": b"", "no image": b"hello", "a decompression bomb": b"P6 30000 30000 255\n"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """27 images, the first 9 of which are blue."""
    return make_folder(tmp_path / "data", parts=("train",)) / "train"


def spoil(path: Path, content: bytes | None = b"no image") -> None:
    path.write_bytes(path.read_bytes()[:500] if content is None else content)


def ask(source: ImageSource, *indices: int, epoch: int | None = 1) -> Batch:
    return source[BatchRequest(indices=indices, epoch=epoch)]


def test_a_jpeg_that_says_it_is_enormous_is_corrupt_without_being_decoded(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = data / "blue sky" / "8.jpg"
    content = path.read_bytes()
    size = content.index(b"\xff\xc0") + 5
    path.write_bytes(content[:size] + (30000).to_bytes(2, "big") * 2 + content[size + 4 :])
    decode = Mock(wraps=simplejpeg.decode_jpeg)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", decode)
    assert ask(load(data, val_split=0.0).train, 8).corrupt.tolist() == [8]
    assert path.read_bytes() not in [call.args[0] for call in decode.call_args_list]
    assert decode.called, "for the image in its place"


@pytest.mark.parametrize("epoch", [1, None])
@pytest.mark.parametrize("content", NO_IMAGES.values(), ids=NO_IMAGES.keys())
def test_a_corrupt_image_is_replaced_by_the_next_one_with_its_label(
    data: Path, content: bytes | None, epoch: int | None
) -> None:
    spoil(data / "blue sky" / "8.jpg", content)
    source = load(data, val_split=0.0).train
    batch = ask(source, 7, 8, 9, epoch=epoch)
    assert batch.indices.tolist() == [7, 8, 9]
    assert batch.labels.tolist() == [0, 1, 1]
    assert batch.corrupt.tolist() == [8]
    assert torch.equal(batch.images[1], batch.images[2])
    assert not torch.equal(batch.images[0], batch.images[1])
    whole = ask(source, 0, 1).corrupt
    assert (whole.dtype, whole.tolist()) == (torch.int64, [])


def test_all_corrupt_images_on_the_way_are_reported_once_and_the_first_comes_after_the_last(data: Path) -> None:
    for name in ("7.png", "8.jpg"):
        spoil(data / "red" / name)
    batch = ask(load(data, val_split=0.0).train, 25, 26, 0)
    assert batch.corrupt.tolist() == [25, 26]
    assert batch.labels.tolist() == [0, 0, 0]
    assert torch.equal(batch.images[0], batch.images[2])
    assert torch.equal(batch.images[1], batch.images[2])


def test_too_many_corrupt_images_in_a_row_end_it_with_the_name_of_the_first(data: Path) -> None:
    for number in range(100):
        (data / "green" / f"a{number:03d}.jpg").touch()
    source = load(data, val_split=0.0).train
    first = data / "green" / "a000.jpg"
    with pytest.raises(UserError, match=f"{first} and the 99 images after it are corrupt: copy the data again"):
        ask(source, 18)
    assert ask(source, 19).labels.tolist() == [2]


@pytest.mark.parametrize("trouble", ["No such file or directory", "Is a directory"])
def test_a_file_that_this_node_cannot_read_is_no_corrupt_image(data: Path, trouble: str) -> None:
    source = load(data, val_split=0.0).train
    lost = data / "green" / "0.jpg"
    lost.unlink()
    if trouble == "Is a directory":
        lost.mkdir()
    with pytest.raises(UserError, match=rf"^{lost} cannot be read on \S+ \({trouble}\): copy the data there again"):
        ask(source, 9)
