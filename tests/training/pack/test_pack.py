"""`python -m training.pack`: what it makes of images, and that it resumes whatever ends it."""

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.cluster import mounted_volume
from support.trainings import Ask, load, make_folder, slow

from training.config.packed_index import INDEX, read_index
from training.data.batch_schedule import BatchRequest
from training.pack.__main__ import main

NAME = ".packed.packing"
# Two chunks and a part of a third one.
MANY = 41


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "training.pack", *map(str, arguments)]


def pack(*arguments: str | Path, code: int = 0, preexec: Callable[[], None] | None = None) -> str:
    """Everything that a packer says."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, preexec_fn=preexec)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def content(directory: Path) -> dict[str, bytes]:
    """All files of a packed data set; of the index what does not depend on the source's place."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    return files | {INDEX: read_index(directory).fingerprint.encode()}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """27 training images and as many to validate and to test with."""
    return make_folder(tmp_path / "photos")


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Images in several chunks."""
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 900, 3), dtype=np.uint8)).save(tmp_path / "0.jpg")
    for number in range(MANY):
        path = tmp_path / "many" / f"class {number % 3}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "0.jpg", path)
    return tmp_path / "many"


@pytest.mark.parametrize("parts", [("train", "valid", "test"), ("train",), ()])
def test_every_image_is_packed_with_its_part_class_and_path(tmp_path: Path, parts: tuple[str, ...]) -> None:
    source = make_folder(tmp_path / "photos", parts=parts or ("train",))
    if not parts:
        source = source / "train"
    pack(source, tmp_path / "packed", "--size", "16")
    index = read_index(tmp_path / "packed")
    assert index.classes == ("blue sky", "green", "red")
    assert [(part.name, part.images) for part in index.parts] == [
        ({"valid": "val"}.get(name, name), 27) for name in parts or ("train",)
    ]
    for part in index.parts:
        assert np.load(tmp_path / "packed" / part.labels.name).tolist() == [0] * 9 + [1] * 9 + [2] * 9
        names = np.load(tmp_path / "packed" / part.names.name)
        images = np.load(tmp_path / "packed" / part.pixels.name)
        assert (images.dtype, images.shape) == (np.uint8, (27, 16, 16, 3))
        for name, image in zip(names, images, strict=True):
            with Image.open(source / os.fsdecode(name)) as photo:
                square = photo.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR, (5, 0, 45, 40))
            assert np.array_equal(image, np.asarray(square))


def test_corrupt_images_are_named_marked_and_replaced_as_in_the_folder(photos: Path, tmp_path: Path) -> None:
    for name in ("blue sky/8.jpg", "red/7.png"):
        (photos / "train" / name).write_bytes(b"no image")
    said = pack(photos, tmp_path / "packed", "--size", "64")
    for name in ("blue sky/8.jpg", "red/7.png"):
        assert f"warning: {photos / 'train' / name} cannot be decoded: it is marked" in said
    assert "2 images cannot be decoded and are marked" in said
    folder, packed = (load(path).train for path in (photos, tmp_path / "packed"))
    for indices in ((7, 8, 9), (24, 25, 26)):
        batches = [source[BatchRequest(indices=indices, epoch=1)] for source in (folder, packed)]
        for one, other in zip(batches[0][1:], batches[1][1:], strict=True):
            assert one.tolist() == other.tolist()
    assert packed.name(8) == folder.name(8) == str(photos / "train" / "blue sky" / "8.jpg")


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def packed_in(directory: Path) -> int:
    """Images that have a record."""
    found = 0
    for path in directory.glob(".*-records.npy"):
        with contextlib.suppress(ValueError, OSError):  # not completely made yet
            found += int(np.count_nonzero(np.load(path)["state"]))
    return found


@contextmanager
def packer_at_its_last_image(source: Path, tmp_path: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A packer that has written all records but those of the last chunk, and waits for its last image to be written."""
    last = max(source.rglob("*.jpg"))
    image = last.read_bytes()
    last.unlink()
    os.mkfifo(last)
    process = started(source, tmp_path / "packed", *flags)
    writer = None
    while writer is None or packed_in(tmp_path / NAME) < MANY // 16 * 16:
        assert process.poll() is None, process.communicate()[0]
        with contextlib.suppress(OSError):  # nobody reads it yet
            writer = writer or os.open(last, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.005)
    yield process
    os.close(writer)
    process.wait()
    last.unlink()
    last.write_bytes(image)


def processes_below(directory: Path) -> list[int]:
    """Processes that have a file in a directory open, or work for one that has."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [descriptor.readlink() for descriptor in (process / "fd").iterdir()]
        except OSError:
            continue
        found += [int(process.name)] if any(link.is_relative_to(directory) for link in links) else []
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, slow(signal.SIGINT)])
def test_an_ended_packer_resumes_with_the_images_that_have_no_record(many: Path, tmp_path: Path, number: int) -> None:
    pack(many, tmp_path / "whole")
    with packer_at_its_last_image(many, tmp_path, "--num-workers", "2") as process:
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait()
            while processes_below(tmp_path / NAME):  # the workers die with it
                time.sleep(0.005)
    said, _ = process.communicate()
    expected = {signal.SIGKILL: -number, signal.SIGTERM: 128 + number, signal.SIGINT: 130}
    assert process.returncode == expected[signal.Signals(number)], said
    assert ("the same command resumes" in said) == (number != signal.SIGKILL)
    assert not (tmp_path / "packed").exists()
    kept = packed_in(tmp_path / NAME)
    assert kept == MANY // 16 * 16
    file = (tmp_path / NAME / "train-pixels.npy").stat().st_ino
    said = pack(many, tmp_path / "packed")
    assert f"{kept} of {MANY} images were packed before" in said
    assert content(tmp_path / "packed") == content(tmp_path / "whole")
    assert (tmp_path / "packed" / "train-pixels.npy").stat().st_ino == file
    assert not (tmp_path / NAME).exists()


def half_packed(source: Path, tmp_path: Path) -> Path:
    """What a killed packer leaves."""
    with packer_at_its_last_image(source, tmp_path) as process:
        process.kill()
    process.communicate()
    assert not (tmp_path / "packed").exists()
    return tmp_path / NAME


def test_a_resumed_packer_decodes_what_has_no_record_or_has_changed_and_notices_other_images(
    many: Path, tmp_path: Path
) -> None:
    directory = half_packed(many, tmp_path)
    shutil.copy(many / "class 0" / "000.jpg", many / "class 0" / "a new one.jpg")
    said = pack(many, tmp_path / "packed", code=2)
    refused = f"{directory} was begun with other images in SRC, or with another --size: use the same, or start over: "
    assert f"{refused}rm -r '{directory}'" in said
    (many / "class 0" / "a new one.jpg").unlink()
    said = pack(many, tmp_path / "packed", "--size", "128", code=2)
    assert refused in said
    pixels = np.load(directory / "train-pixels.npy", mmap_mode="r+")
    pixels[1], pixels[-1] = 1, 1
    Image.new("RGB", (300, 300), (255, 0, 0)).save(many / "class 0" / "000.jpg", quality=100)
    pack(many, tmp_path / "packed")
    changed, kept, last = np.load(tmp_path / "packed" / "train-pixels.npy")[[0, 1, -1]]
    assert changed[..., 0].min() > 250
    assert changed[..., 1:].max() < 5
    assert kept.max() == 1, "an image that has a record is not decoded again"
    assert last.max() > 1


def test_records_of_pixels_that_are_gone_are_not_believed(many: Path, tmp_path: Path) -> None:
    directory = half_packed(many, tmp_path)
    (directory / "train-pixels.npy").unlink()
    assert "packed before" not in pack(many, tmp_path / "packed")
    assert np.load(tmp_path / "packed" / "train-pixels.npy").max(axis=(1, 2, 3)).min() > 0


def test_a_second_packer_is_refused_and_harms_nothing(photos: Path, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with (tmp_path / NAME / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = pack(photos, tmp_path / "packed", code=1)
        assert f"error: another process packs into {tmp_path / 'packed'}: wait for it" in said
    pack(photos, tmp_path / "packed")


def test_two_packers_at_once_make_one_data_set(many: Path, tmp_path: Path) -> None:
    both = [started(many, tmp_path / "packed", "--num-workers", "1") for _ in range(2)]
    codes = sorted(process.wait() for process in both)
    said = "".join(process.communicate()[0] for process in both)
    assert codes in ([0, 0], [0, 1]), said
    assert "Traceback" not in said
    pack(many, tmp_path / "alone")
    assert content(tmp_path / "packed") == content(tmp_path / "alone")


def test_a_full_disk_ends_it_resumably(many: Path, tmp_path: Path) -> None:
    half_packed(many, tmp_path)
    kept = packed_in(tmp_path / NAME)
    limit = (kept + 1) * 3 * 256**2

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    said = pack(many, tmp_path / "packed", code=1, preexec=limit_files)
    assert "File too large: fix that; the same command resumes" in said
    assert not (tmp_path / "packed").exists()
    assert packed_in(tmp_path / NAME) >= kept
    pack(many, tmp_path / "packed")


def test_space_is_looked_at_first(photos: Path, tmp_path: Path) -> None:
    with mounted_volume(tmp_path / "little", "size=2m") as little:
        said = pack(photos, little / "packed", code=2)
        assert f"error: {little} has " in said
        assert "need 15 MB: free some space, use a smaller --size, or give another DST" in said
        pack(photos, little / "packed", "--size", "32")


def test_what_is_packed_stays_as_it_is_and_wrong_directories_are_refused(
    photos: Path, tmp_path: Path, idx_data: Path, ask: Ask
) -> None:
    packed, full, new = (tmp_path / name for name in ("packed", "full", "new"))
    pack(photos, packed, "--size", "32")
    before = {path: path.stat().st_mtime_ns for path in packed.iterdir()}
    assert f"{packed} is packed already: 81 images" in pack(photos, packed, "--size", "32")
    full.mkdir()
    (full / "thesis.txt").write_text("years of work")
    for arguments, complaint in (
        ((tmp_path / "nowhere", new), "nowhere, which is not a directory: give the image folder"),
        ((full, new), f"error: SRC is {full}, but there are no images in class directories"),
        ((idx_data, new), f"{idx_data} needs no packing: train from it as it is"),
        ((photos, full), "exists and is not a packed data set: give a new directory"),
        ((photos, photos / "packed"), "which is inside SRC: give a directory outside of"),
        ((photos, packed, "--size", "64"), "was packed from other images, or with another --size"),
        ((photos, new, "--size", "4"), "--size is 4: use 8 or more"),
    ):
        code, _, said = ask(*arguments, program=main)
        assert code == 2
        assert complaint in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "packed", "photos"]
    assert [path.name for path in full.iterdir()] == ["thesis.txt"]
    assert {path: path.stat().st_mtime_ns for path in packed.iterdir()} == before


def test_an_image_that_cannot_be_read_is_no_corrupt_one(photos: Path, tmp_path: Path) -> None:
    path = photos / "train" / "green" / "3.png"
    path.unlink()
    path.symlink_to(photos)
    assert f"error: {path}: Is a directory: fix that; the same command" in pack(photos, tmp_path / "packed", code=1)


def test_packer_needs_no_torch_and_the_login_node_neither_numpy_to_recognise_packed_data(packed_data: Path) -> None:
    code = "import sys; from training.config.dataset_layout import check_data; from pathlib import Path; "
    code += "print(check_data(Path(sys.argv[1])).kind, sorted({'torch', 'numpy'} & set(sys.modules))); "
    code += "import training.pack.__main__; print(sorted({'torch', 'torchvision', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, packed_data], capture_output=True, text=True, check=True)
    assert done.stdout == "packed []\n[]\n"
