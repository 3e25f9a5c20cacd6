"""A recipe for photographs trains what it says, at the rate that it says."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.trainings import Starter, lines

from training.config.train_config import TrainConfig
from training.models.factory import build_model


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


def test_the_vgg19_recipe_trains_the_head_alone_at_its_rate(start: Starter, folder_data: Path, tmp_path: Path) -> None:
    start.data, before = folder_data, make_weights(tmp_path / "w.pth")
    flags = ("--model=resnet20", f"--weights={tmp_path / 'w.pth'}", "--image-size=16", "--epochs=2", "--num-workers=0")
    flags = (*flags, "--recipe=vgg19-20class", "--batch-size=20")
    run = start.complete(*flags, world_size=2).run_dir
    assert changed(run, before) == {"fc"}
    assert logged(run) == pytest.approx({1: 2e-4 * (20 / 256) ** 0.5, 2: 2e-4 * (20 / 256) ** 0.5})
    thawed = start.complete(
        "--recipe=vgg19-20class", *flags, "--batch-size=20", "--no-freeze-backbone", run="thawed"
    ).run_dir
    assert changed(thawed, before) == {"features", "fc"}
