"""Trainings on pieces of photographs: they learn what is in them, and what they have learned can be used."""

import csv
import io
from importlib.resources import files
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.trainings import Ask, Starter, lines, result

from training.config.dataset_layout import check_data
from training.config.train_config import TrainConfig
from training.inference import export
from training.models.factory import build_model

# Those that scikit-image ships; together they have hundreds of pieces that do not overlap.
PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "ihc.png", "retina.jpg", "rocket.jpg")
SIDE, PIECES = 50, {"Train": 36, "Validation": 6, "test": 12}


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


@pytest.mark.usefixtures("one_thread")
def test_photographs_are_classified_and_other_programs_can_use_the_model(
    start: Starter, album: Path, tmp_path: Path, ask: Ask
) -> None:
    layout = check_data(album)
    assert (layout.train.name, layout.val and layout.val.name, layout.test and layout.test.name) == tuple(PIECES)
    start.data = album
    flags = ("--epochs=12", "--batch-size=18", "--lr=0.03", "--image-size=32", "--num-workers=0")
    run = start.complete(*flags, world_size=2).run_dir
    outcome = result(run)
    assert outcome["classes"] == [Path(name).stem for name in PHOTOS]
    assert outcome["test_total"] == len(PHOTOS) * PIECES["test"]
    assert outcome["test_accuracy"] > 0.5, "a sixth would be chance"

    assert ask(run, f"--output={tmp_path / 'model.pt2'}", program=export.main)[0] == 0
    for model in (run, tmp_path / "model.pt2"):
        code, out, _ = ask(model, album / "test", "--csv")
        right = [row["class"] == Path(row["path"]).parent.name for row in csv.DictReader(io.StringIO(out))]
        assert (code, sum(right), len(right)) == (0, outcome["test_correct"], outcome["test_total"])


# --- recipes for photographs ---


def make_weights(path: Path) -> dict[str, torch.Tensor]:
    """Weights of a small network for images in color, with a head of 20 classes."""
    config = TrainConfig(data="x", model="resnet20", seed=9)
    weights = build_model(config, classes=20, channels=3, size=16).state_dict()
    torch.save(weights, path)
    return weights


def changed(run: Path, before: dict[str, torch.Tensor]) -> set[str]:
    """The outermost parts of the model whose weights have changed."""
    after = load_file(run / "final" / "model.safetensors")
    same = {name for name, value in before.items() if name in after and torch.equal(value, after[name])}
    return {name.partition(".")[0] for name in after.keys() - same}


def logged(run: Path) -> dict[int, float]:
    """The learning rate at the end of each epoch."""
    return {line["epoch"]: line["lr"] for line in lines(run / "metrics" / "train.jsonl")}


def test_the_vgg19_recipe_trains_the_head_alone_at_its_rate(start: Starter, album: Path, tmp_path: Path) -> None:
    start.data, before = album, make_weights(tmp_path / "w.pth")
    flags = ("--model=resnet20", f"--weights={tmp_path / 'w.pth'}", "--image-size=16", "--epochs=2", "--num-workers=0")
    run = start.complete("--recipe=vgg19-20class", *flags, "--batch-size=100", world_size=2).run_dir
    assert changed(run, before) == {"fc"}
    assert logged(run) == pytest.approx({1: 2e-4 * (100 / 256) ** 0.5, 2: 2e-4 * (100 / 256) ** 0.5})
    thawed = start.complete("--recipe=vgg19-20class", *flags, "--no-freeze-backbone", run="thawed").run_dir
    assert changed(thawed, before) == {"features", "fc"}


@pytest.mark.slow
def test_the_finetune_recipe_trains_everything_and_lowers_the_rate_on_a_plateau(
    start: Starter, album: Path, tmp_path: Path
) -> None:
    start.data, before = album, make_weights(tmp_path / "w.pth")
    flags = ("--model=resnet20", f"--weights={tmp_path / 'w.pth'}", "--image-size=16", "--epochs=8", "--num-workers=0")
    flags = (*flags, "--plateau-patience=0", "--lr=0.003", "--batch-size=18")
    training = start.complete("--recipe=finetune", *flags, world_size=2)
    assert "but a new fc.0, fc.2" in training.output()
    assert changed(training.run_dir, before) == {"features", "fc"}
    head = load_file(training.run_dir / "final" / "model.safetensors")["fc.0.weight"]
    assert head.shape == (512, 64)
    losses = [line["loss"] for line in lines(training.run_dir / "metrics" / "eval.jsonl") if line["split"] == "val"]
    expected, rate, lowest = {}, 0.003, float("inf")
    for epoch, loss in enumerate(losses, start=1):
        expected[epoch] = rate
        rate, lowest = (rate, loss) if loss < lowest * (1 - 1e-4) else (rate / 10, lowest)
    assert logged(training.run_dir) == pytest.approx(expected)
    assert expected[8] < 0.003, "the case needs a plateau"
