"""Data on the device: a loader's images in every bit, for every augmentation that can be there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainings import asked, load

from training.data.batch_schedule import BatchRequest, evaluation_requests
from training.data.build import moved
from training.data.loader import Batch, load_device_batches

CPU = torch.device("cpu")
OPTIONS: list[dict[str, Any]] = [
    {"crop": "padded", "flip": "on"},
    {"crop": "none", "flip": "on", "random_erasing": 0.5},
]


@pytest.fixture(params=["idx_data", "cifar_data"])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def same(one: Batch, other: Batch) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_a_rank_sees_is_the_same_wherever_its_data_lie(path: Path, options: dict[str, Any]) -> None:
    data = load(path, val_split=0.2, **options)
    there = moved(data, CPU)
    assert (there.on_device, data.on_device) == (True, False)
    count = len(data.train)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    requests = [BatchRequest(indices=tuple(order[start::3]), epoch=start) for start in range(3)]
    with load_device_batches(CPU, there.train, requests, 0) as batches:
        for seen, expected in zip(batches, asked(data.train, requests, workers=1), strict=True):
            assert same(seen, expected)
    for part, same_part in ((data.train, there.train), (data.val, there.val), (data.test, there.test)):
        assert part is not None
        assert same_part is not None
        evaluation = list(evaluation_requests(len(part), 7, 0, 2))
        assert all(map(same, asked(same_part, evaluation, 0), asked(part, evaluation, 0)))
        assert part.name(2) == same_part.name(2)
        assert torch.equal(part.labels, same_part.labels)
