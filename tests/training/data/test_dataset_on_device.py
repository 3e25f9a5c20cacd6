"""Data on the device: a loader's images in every bit, for every augmentation that can be there, and what cannot."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainings import asked, load

from hpc.base.errors import UserError
from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchRequest, evaluation_requests
from training.data.build import move_to_device, synthetic_data, too_large
from training.data.dataset import Data
from training.data.loader import Batch, load_device_batches

CPU = torch.device("cpu")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"crop": "padded", "flip": "on"},
    {"crop": "none", "flip": "on", "random_erasing": 0.5},
]


@pytest.fixture(params=["idx_data", "cifar_data"])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def on_device(data: Data, **options: Any) -> Data:
    config = TrainConfig(**{"data": ".", "data_on_device": "on", **options})
    return move_to_device(config, data, CPU)


def same(one: Batch, other: Batch) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_a_rank_sees_is_the_same_wherever_its_data_lie(path: Path, options: dict[str, Any]) -> None:
    data = load(path, val_split=0.2, **options)
    moved = on_device(data, **options)
    assert (moved.on_device, data.on_device) == (True, False)
    count = len(data.train)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    requests = [BatchRequest(indices=tuple(order[start::3]), epoch=start) for start in range(3)]
    with load_device_batches(CPU, moved.train, requests, 0) as batches:
        for seen, expected in zip(batches, asked(data.train, requests, workers=1), strict=True):
            assert same(seen, expected)
    for part, same_part in ((data.train, moved.train), (data.val, moved.val), (data.test, moved.test)):
        assert part is not None
        assert same_part is not None
        evaluation = list(evaluation_requests(len(part), 7, 0, 2))
        assert all(map(same, asked(same_part, evaluation, 0), asked(part, evaluation, 0)))
        assert part.name(2) == same_part.name(2)
        assert torch.equal(part.labels, same_part.labels)


def test_data_are_moved_only_where_the_flag_asks_for_it(idx_data: Path) -> None:
    data = load(idx_data)
    for wanted in ("auto", "off"):
        assert on_device(data, data_on_device=wanted) is data
    config = TrainConfig(synthetic=True, batch_size=8, data_on_device="on")
    assert move_to_device(config, synthetic_data(config, 16), CPU).on_device, "generated images can be there, too"


def test_other_data_are_refused_with_what_to_use(folder_data: Path, idx_data: Path) -> None:
    message = "--data-on-device is on, but the images of a folder or of packed data are cropped on the CPU: use auto"
    with pytest.raises(UserError, match=re.escape(message)):
        on_device(load(folder_data))
    for options in ({"auto_augment": "randaugment"}, {"crop": "resized"}):
        with pytest.raises(UserError, match="--data-on-device on cannot be combined with --auto-augment, "):
            TrainConfig(data=".", data_on_device="on", **options)
        with pytest.raises(UserError, match="--data-on-device is on, but the augmentation runs on the CPU: use auto"):
            on_device(load(idx_data, **options))
        assert on_device(load(idx_data, **options), data_on_device="auto").on_device is False


def test_on_a_gpu_images_must_fit_and_auto_leaves_most_of_it_free() -> None:
    message = "the images take 9.0 GB, and the GPU has 8.0 GB free"
    assert too_large(9 * 10**9, 8 * 10**9, "on") == message
    assert too_large(8 * 10**9, 8 * 10**9, "on") == ""
    assert too_large(8 * 10**8, 8 * 10**9, "auto") == ""
    assert too_large(8 * 10**8 + 1, 8 * 10**9, "auto")
