"""Synthetic data, and the profile of a training: the costs of its parts, and which flag to change."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.trainings import Ask, Starter, documented, lines

from training import profile
from training.profile import Costs


def test_a_training_on_generated_images_needs_no_data(start: Starter, tmp_path: Path) -> None:
    start.data = tmp_path / "nowhere"
    flags = ("--synthetic", "--epochs=2", "--batch-size=6", "--image-size=8", "--log-every=50")
    run = start.complete(*flags, world_size=2).run_dir
    assert [line["step"] for line in lines(run / "metrics" / "train.jsonl")] == [50, 100, 150, 200]
    card = json.loads((run / "final" / "model.json").read_text())
    assert card["made_from"]["data"] == {"path": None, "fingerprint": "synthetic", "images": {"train": 600}}
    assert card["image_shape"] == [3, 8, 8]


COSTS = Costs(step=10, loading=1, decode=None, augment=None, copy=None, compute=5, all_reduce=None)


@pytest.mark.parametrize(
    ("costs", "workers", "part"),
    [
        ({}, 2, "compute"),
        ({"copy": 7, "all_reduce": 6}, 2, "copy"),
        ({"loading": 20, "decode": 14, "augment": 6}, 2, "decode"),
        ({"loading": 20, "decode": 1, "augment": 1}, 2, "loading"),
        ({"loading": 8, "copy": 4, "augment": 8}, 2, "compute"),
        ({"loading": 8, "copy": 4, "augment": 8}, 0, "augment"),
    ],
)
def test_the_bottleneck_is_what_the_step_waits_for(costs: dict[str, float], workers: int, part: str) -> None:
    assert profile.bottleneck(replace(COSTS, **costs), workers) == part
    assert part in profile.ADVICE


FLAGS = ("--batch-size=8", "--seconds=0.05")


@pytest.mark.usefixtures("one_thread")
def test_the_parts_of_a_training_are_measured(
    folder_data: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = (f"--data={folder_data}", "--image-size=16", "--num-workers=1")
    code, out, err = ask(*FLAGS, *data, "--json", program=profile.main)
    assert code == 0
    result = documented("profile", code, out, err)
    assert (result["world_size"], result["workers"], result["batch_size"]) == (1, 1, 8)
    known = {name for name, value in result["milliseconds"].items() if value is not None}
    assert known == {"step", "loading", "decode", "augment", "compute"}
    assert all(result["milliseconds"][name] > 0 for name in known - {"augment"})
    assert result["bottleneck"] in profile.ADVICE
    assert list(tmp_path.glob("torchrelay-*")) == []
