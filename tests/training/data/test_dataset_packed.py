"""Training from packed data: what a rank sees of them, that it is exact, and what it says of damaged ones."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.trainings import load, make_folder, pack_folder

from hpc.base.errors import UserError
from training.config.dataset_layout import check_data
from training.config.packed_index import INDEX
from training.data.batch_schedule import BatchRequest


@pytest.fixture
def packed(packed_data: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(packed_data, tmp_path / "packed"))


def test_an_evaluation_sees_the_middle_without_scaling_where_it_fits(packed_data: Path) -> None:
    pixels = np.load(packed_data / "val-pixels.npy")
    val = load(packed_data, image_size=35).val  # 224 of 256 is 35 of 40
    assert val is not None
    seen = val[BatchRequest(indices=tuple(range(27)), epoch=None)].images
    assert torch.equal(seen, torch.from_numpy(pixels)[:, 2:37, 2:37].permute(0, 3, 1, 2))


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path, packed_data: Path) -> None:
    source = make_folder(tmp_path / "photos")
    same = pack_folder(source, tmp_path / "same")
    (source / "val" / "red" / "0.jpg").write_bytes((source / "val" / "green" / "0.jpg").read_bytes())
    other = pack_folder(source, tmp_path / "other")
    assert load(same).fingerprint == load(packed_data).fingerprint != load(other).fingerprint


def special(directory: Path) -> dict[str, Path]:
    """Images of kinds that are easily mistaken."""
    directory.mkdir(parents=True)
    left_dark = np.zeros((40, 60, 3), np.uint8)
    left_dark[:, 30:] = 200
    image, ramp = Image.fromarray(left_dark), np.linspace(0, 65535, 2400).reshape(40, 60).astype(np.uint16)
    turned = Image.Exif()
    turned[0x0112] = 6
    image.save(directory / "turned.jpg", exif=turned)
    image.convert("L").save(directory / "gray.jpg")
    image.convert("CMYK").save(directory / "cmyk.jpg")
    Image.fromarray(ramp).save(directory / "deep.png")
    image.convert("RGBA").save(directory / "transparent.png")
    image.quantize(4).save(directory / "palette.png")
    image.resize((1500, 1000)).save(directory / "large.jpg", quality=95)
    return {path.stem: path for path in directory.iterdir()}


def test_images_of_all_kinds_look_as_in_the_folder(tmp_path: Path) -> None:
    paths = special(tmp_path / "photos" / "class")
    pack_folder(tmp_path / "photos", tmp_path / "packed")
    everything = BatchRequest(indices=tuple(range(len(paths))), epoch=None)
    folder, packed = (load(tmp_path / name, val_split=0.0, image_size=35).train for name in ("photos", "packed"))
    seen, expected = (source[everything].images.float() for source in (packed, folder))
    # A packed one is scaled twice, so an edge may lie some pixels' parts elsewhere.
    assert float((seen - expected).abs().mean(dim=(1, 2, 3)).max()) < 8
    names = sorted(paths)
    deep = seen[names.index("deep")][0]
    assert float(deep[0].mean()) < 40
    assert float(deep[-1].mean()) > 215
    for name in ("turned", "large", "cmyk", "gray", "transparent", "palette"):
        left, right = seen[names.index(name)][..., :10].mean(), seen[names.index(name)][..., -10:].mean()
        assert float(left) < 20, name
        assert 180 < float(right) < 220, name


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["train-pixels.npy", "val-labels.npy", "test-names.npy"])
@pytest.mark.parametrize(
    ("damage", "complaint"), [(Path.unlink, "is missing"), (truncate, r"has \d+ bytes instead of")]
)
def test_a_missing_or_truncated_file_is_named_before_anything_is_queued(
    packed: Path, name: str, damage: Callable[[Path], None], complaint: str
) -> None:
    damage(packed / name)
    message = f"{packed / name} {complaint}.*: copy the packed data again, or pack them again"
    with pytest.raises(UserError, match=message):
        check_data(packed)


def of_other_size(path: Path) -> None:
    """As many bytes of another array."""
    array = np.load(path)
    np.save(path, array.reshape(len(array), 20, 80, 3))


def scrambled(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(b"x" * 128 + content[128:])


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("train-pixels.npy", of_other_size, "holds uint8 [27, 20, 80, 3] instead of [27, 40, 40, 3]"),
        ("train-pixels.npy", scrambled, "is truncated or not a NumPy array"),
        ("train-labels.npy", scrambled, "does not have its checksum"),
    ],
)
def test_a_foreign_file_is_named_by_the_ranks(
    packed: Path, name: str, damage: Callable[[Path], None], complaint: str
) -> None:
    damage(packed / name)
    with pytest.raises(UserError, match=re.escape(f"{packed / name} {complaint}")):
        load(packed)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[: len(text) // 2], "is damaged, or not an index of packed data"),
        (lambda _: '{"version": 2, "fingerprint": ""}', "is damaged, or not an index of packed data"),
        (lambda text: text.replace('"version": 2', '"version": 1'), "has version 1 instead of 2"),
        (lambda text: text.replace('"red"', '"rot"'), "is damaged or was edited, because its fingerprint differs"),
    ],
)
def test_a_wrong_index_is_named(packed: Path, damage: Callable[[str], str], complaint: str) -> None:
    path = packed / INDEX
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match=f"{path} {complaint}.*pack"):
        check_data(packed)
