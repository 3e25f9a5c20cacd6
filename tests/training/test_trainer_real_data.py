"""Trainings on real images in real files: they learn what is in them, and what they have learned can be used.

Fashion-MNIST's clothes as CIFAR-10's batches and as a folder of PNGs, and pieces of photographs as PNGs and JPEGs.
"""

import csv
import io
import json
import os
import subprocess
import sys
from importlib.resources import files
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from trainer_rig import Ask, Starter, write_cifar

from training import export
from training.idx import class_names, read_idx_pair
from training.layout import CIFAR, FASHION_MNIST_DIRECTORY, check_data

CIFAR10 = CIFAR["cifar10"]
# Those that scikit-image ships; together they have hundreds of pieces that do not overlap.
PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "ihc.png", "retina.jpg", "rocket.jpg")
SIDE, PIECES = 50, {"Train": 36, "Validation": 6, "test": 12}


def clothes(part: str, count: int) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """The first images [n, 28, 28] of Fashion-MNIST, their labels, and the names of all classes."""
    images, labels = read_idx_pair(FASHION_MNIST_DIRECTORY, part)
    everything = read_idx_pair(FASHION_MNIST_DIRECTORY, "train")[1]
    return images[:count, 0].numpy(), labels[:count].numpy(), class_names(everything, 10)


def in_color(images: np.ndarray) -> np.ndarray:
    """[n, 3, 32, 32] of [n, 28, 28]."""
    return np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None].repeat(3, axis=1)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10's files, with 2,500 clothes to learn from and 500 to be tested on."""
    images, labels, names = clothes("train", 2500)
    test, test_labels, _ = clothes("test", 500)
    parts = {name: (in_color(images[n::5]), labels[n::5]) for n, name in enumerate(CIFAR10.train)}
    parts[CIFAR10.test] = (in_color(test), test_labels)
    return write_cifar(tmp_path_factory.mktemp("real") / "cifar-10-batches-py", "cifar10", parts, list(names))


@pytest.fixture(scope="module")
def wardrobe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 1,000 clothes to learn from and 300 to be tested on, with no images set apart for validation."""
    directory = tmp_path_factory.mktemp("real") / "wardrobe"
    for part, source, count in (("train", "train", 1000), ("test", "test", 300)):
        for number, (image, label) in enumerate(zip(*clothes(source, count)[:2], strict=True)):
            path = directory / part / f"{label}" / f"{number:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return directory


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces of photographs; which photograph a piece is from is its class. No pixel is in two parts."""
    directory, random = tmp_path_factory.mktemp("real") / "album", np.random.default_rng(4)
    for name in PHOTOS:
        photo = Image.open(str(files("skimage") / "data" / name)).convert("RGB")
        corners = list(product(range(0, photo.width - SIDE + 1, SIDE), range(0, photo.height - SIDE + 1, SIDE)))
        chosen = iter(random.permutation(corners).tolist())
        for part, count in PIECES.items():
            (directory / part / Path(name).stem).mkdir(parents=True)
            for number, (left, top) in enumerate(islice(chosen, count)):
                piece = photo.crop((left, top, left + SIDE, top + SIDE))
                piece.save(directory / part / Path(name).stem / f"{number}.{'png' if number % 2 else 'jpg'}")
    return directory


def result(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "final" / "result.json").read_text()))


def test_torchrun_trains_on_cifars_batches_of_real_clothes(batches: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command = [*torchrun, "--rdzv-endpoint=localhost:0", "-m", "training", f"--data={batches}"]
    flags = [f"--run-dir={tmp_path / 'run'}", "--epochs=6", "--batch-size=50", "--lr=0.05", "--flip=off", "--ema=0.99"]
    subprocess.run([*command, *flags], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    told = result(tmp_path / "run")
    assert told["classes"][9] == "Ankle boot"
    assert told["test_total"] == 500
    assert told["test_accuracy"] > 0.65, "a tenth would be chance"


def test_a_folder_of_real_clothes_is_learned(start: Starter, wardrobe: Path) -> None:
    start.data = wardrobe
    flags = ("--epochs=4", "--batch-size=20", "--lr=0.03", "--image-size=28", "--crop=padded", "--workers=0")
    told = result(start.complete(*flags, world_size=2).run_dir)
    assert told["test_total"] == 300
    assert told["test_accuracy"] > 0.6, "a tenth would be chance"


@pytest.mark.usefixtures("one_thread")
def test_photographs_are_told_apart_and_others_can_use_the_model(
    start: Starter, album: Path, tmp_path: Path, ask: Ask
) -> None:
    layout = check_data(album)
    assert (layout.train.name, layout.val and layout.val.name, layout.test and layout.test.name) == tuple(PIECES)
    start.data = album
    flags = ("--epochs=12", "--batch-size=18", "--lr=0.03", "--image-size=32", "--workers=0")
    run = start.complete(*flags, world_size=2).run_dir
    told = result(run)
    assert told["classes"] == [Path(name).stem for name in PHOTOS]
    assert told["test_total"] == len(PHOTOS) * PIECES["test"]
    assert told["test_accuracy"] > 0.5, "a sixth would be chance"

    assert ask(run, f"--output={tmp_path / 'model.pt2'}", program=export.main)[0] == 0
    for model in (run, tmp_path / "model.pt2"):
        code, out, _ = ask(model, album / "test", "--csv")
        right = [row["class"] == Path(row["path"]).parent.name for row in csv.DictReader(io.StringIO(out))]
        assert (code, sum(right), len(right)) == (0, told["test_correct"], told["test_total"])
