"""Another image size in evaluations than in training: what the model sees, what is written, which models cannot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainer_rig import Starter, load

from hpc.core.errors import UserError
from training.config.dataset_layout import check_data
from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchRequest
from training.data.loader import ImageSource
from training.models.factory import build_model
from training.predict import PredictOptions, predict

SMALL = ("--model=resnet20", "--image-size=16", "--eval-image-size=24", "--epochs=3", "--batch-size=9", "--lr=0.02")


@pytest.fixture(scope="module")
def packed_data(folder_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    packed = tmp_path_factory.mktemp("packed") / "packed"
    command = [sys.executable, "-m", "training.pack", folder_data, packed, "--size", "40"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return packed


def look(source: ImageSource | None, epoch: int | None) -> Tensor:
    assert source is not None
    return source[BatchRequest(indices=tuple(range(5)), epoch=epoch)].images


@pytest.mark.parametrize("kind", ["folder_data", "packed_data"])
def test_photos_are_larger_in_evaluations_alone(kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    data, small, large = (
        load(path, **sizes)
        for sizes in ({"image_size": 16, "eval_image_size": 24}, {"image_size": 16}, {"image_size": 24})
    )
    assert torch.equal(look(data.train, 1), look(small.train, 1))
    for part in ("val", "test"):
        assert torch.equal(look(getattr(data, part), None), look(getattr(large, part), None))
    held_out = load(check_data(path).train, image_size=16, eval_image_size=24) if kind == "folder_data" else data
    assert look(held_out.val, None).shape[2:] == (24, 24)


def test_a_trained_model_is_tested_and_used_with_the_size_of_its_evaluation(start: Starter, folder_data: Path) -> None:
    start.data = folder_data
    run = start.complete(*SMALL).run_dir
    result = json.loads((run / "final" / "result.json").read_text())
    card = json.loads((run / "final" / "model.json").read_text())
    assert result["input"]["size"] == card["size"] == 24
    assert card["image_shape"] == [3, 24, 24]
    predictions = predict(PredictOptions(model=str(run), images=(folder_data / "test",)))
    assert sum(each.top[0][0] == each.path.parent.name for each in predictions) == result["test_correct"]


def test_images_in_memory_are_scaled_for_evaluations(start: Starter) -> None:
    run = start.complete(*SMALL).run_dir
    card = json.loads((run / "final" / "model.json").read_text())
    assert (card["image_shape"], card["size"]) == ([1, 12, 12], 24)


@pytest.mark.parametrize(("model", "size", "other"), [("small-cnn", 28, 32), ("vit_b_32", 32, 64), ("alexnet", 96, 32)])
def test_a_model_for_one_size_refuses_another(model: str, size: int, other: int) -> None:
    config = TrainConfig(data=".", model=model, image_size=size, eval_image_size=other)
    message = rf"--eval-image-size is {other}, which {model} for {size} pixels does not take \(.+\): leave it out"
    with pytest.raises(UserError, match=message):
        build_model(config, classes=3, channels=3, size=size)


def test_the_same_size_is_no_other() -> None:
    config = TrainConfig(data=".", image_size=28, eval_image_size=28)
    model = build_model(config, classes=3, channels=3, size=28)
    assert model(torch.zeros(1, 3, 28, 28)).shape == (1, 3)
