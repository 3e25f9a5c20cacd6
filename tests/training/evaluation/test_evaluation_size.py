"""Another image size in evaluations than in training: what the model sees, what is written, which models cannot."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from support.trainings import Starter, load
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification

from benchmarks.photos import photo
from hpc.base.errors import UserError
from hpc.run.rundir import RunDir
from training.config.dataset_layout import check_data
from training.config.evaluation_task import EvaluationTask
from training.config.rules import parse_crop_pct
from training.config.train_config import Interpolation, TrainConfig
from training.data.batch_schedule import BatchRequest
from training.data.loader import ImageSource
from training.data.transforms.crop import CenterCrop
from training.engine.evaluation_run import fitting, open_data
from training.inference.model_card import ModelCard, read_card
from training.inference.predict import PredictOptions, predict
from training.models.factory import SmallResNet, build_model
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext

SMALL = ("--model=resnet20", "--image-size=16", "--eval-image-size=24", "--batch-size=9", "--lr=0.02")
CROP = ("--eval-crop-pct=24/28", "--interpolation=bicubic")


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
    run = start.complete(*SMALL, *CROP, "--epochs=3").run_dir
    result = json.loads((run / "final" / "result.json").read_text())
    card = json.loads((run / "final" / "model.json").read_text())
    assert result["input"]["size"] == card["size"] == 24
    assert card["image_shape"] == [3, 24, 24]
    assert (card["crop_pct"], card["interpolation"]) == (24 / 28, "bicubic")
    predictions = predict(PredictOptions(model=str(run), images=(folder_data / "test",)))
    assert sum(each.top[0][0] == each.path.parent.name for each in predictions) == result["test_correct"]


@pytest.mark.parametrize("interpolation", get_args(Interpolation))
@pytest.mark.parametrize(("crop", "resize"), [(224, 256), (224, 232), (224, 224), (299, 342), (24, 28)])
def test_an_evaluation_shows_the_pixels_of_torchvisions_presets(
    interpolation: Interpolation, crop: int, resize: int
) -> None:
    share = float(parse_crop_pct(f"{crop}/{resize}"))
    shown = CenterCrop(size=(crop, crop), crop_pct=share, interpolation=interpolation)
    preset = ImageClassification(
        crop_size=crop, resize_size=resize, interpolation=InterpolationMode(interpolation), mean=(0,) * 3, std=(1,) * 3
    )
    photograph = Image.open(io.BytesIO(photo(0)))
    sizes = [photograph.size, *((300 + 7 * number, 701 - 13 * number) for number in range(20)), (256, 256), (97, 31)]
    for size in sizes:
        image = photograph.resize(size)
        expected = (preset(image) * 255).round().to(torch.uint8)
        assert torch.equal(shown.of(torch.from_numpy(np.array(image))), expected), size


def test_another_evaluation_prepares_images_as_the_model_card_says(folder_data: Path, group: ProcessGroup) -> None:
    trained = load(folder_data, image_size=16, eval_image_size=24, eval_crop_pct="24/28", interpolation="bicubic")
    card = ModelCard(
        model="resnet20", head_hidden=0, transform_input=False, classes=trained.classes, crop_pct=24 / 28,
        interpolation="bicubic", image_shape=(3, 24, 24), channels=3, size=24, mean=trained.mean, std=trained.std,
        amp="none", made_from={},
    )  # fmt: skip
    assert read_card(card.to_json(), "model.json") == card
    older = {name: value for name, value in json.loads(card.to_json()).items() if name != "interpolation"}
    assert read_card(json.dumps(older), "model.json") == replace(card, interpolation="bilinear")
    context = RunContext(config=TrainConfig(data=str(folder_data)), run_dir=RunDir(folder_data), attempt=1, started=0.0)
    _, data = open_data(context, group, EvaluationTask(source="run"), card)
    assert data.test is not None
    assert torch.equal(look(fitting(data.test, data, card), None), look(trained.test, None))


@pytest.mark.parametrize(("model", "size", "other"), [("small-cnn", 28, 32), ("vit_b_32", 32, 64), ("alexnet", 96, 32)])
def test_a_model_for_one_size_refuses_another(model: str, size: int, other: int) -> None:
    config = TrainConfig(data=".", model=model, image_size=size, eval_image_size=other)
    message = rf"--eval-image-size is {other}, which {model} for {size} pixels does not take \(.+\): leave it out"
    with torch.device("meta"), pytest.raises(UserError, match=message):
        build_model(config, classes=3, channels=3, size=size)


def test_first_images_must_suit_the_model_and_be_smaller() -> None:
    config = TrainConfig(data=".", image_size=28, initial_image_size=16)
    with pytest.raises(UserError, match=r"--initial-image-size is 16, which small-cnn for 28 pixels does not take \("):
        build_model(config, classes=3, channels=3, size=28)
    config = TrainConfig(data=".", model="resnet20", initial_image_size=32)
    with pytest.raises(UserError, match="--initial-image-size is 32, but --image-size is 32: use a smaller one"):
        build_model(config, classes=3, channels=3, size=32)
    with pytest.raises(UserError, match="--initial-image-size must be smaller than --image-size"):
        TrainConfig(data=".", model="resnet20", image_size=32, initial_image_size=32)


def test_the_images_of_all_epochs_must_suit_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(_model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        if images.shape[-1] % 8:
            raise RuntimeError("sizes differ")
        return images

    monkeypatch.setattr(SmallResNet, "forward", forward)
    config = TrainConfig(data=".", model="resnet20", image_size=48, initial_image_size=32)
    message = "--initial-image-size is 32 and gives images of 36 pixels, which resnet20 for 48 pixels does not take"
    with pytest.raises(UserError, match=message):
        build_model(config, classes=3, channels=3, size=48)
