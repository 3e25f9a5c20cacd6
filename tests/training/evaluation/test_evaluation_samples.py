"""The sample predictions that a training leaves are honest ones."""

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.trainings import Starter, Training, load, make_folder

SHORT = ("--epochs=1", "--batch-size=20", "--lr=0.05")


@pytest.fixture(scope="module")
def run(idx_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Starter(idx_data, tmp_path_factory.mktemp("samples")).complete(*SHORT)


def samples(run_dir: Path) -> list[dict[str, Any]]:
    return list(json.loads((run_dir / "final" / "samples.json").read_text()))


def pixels(sample: dict[str, Any]) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(base64.b64decode(sample["png"]))))


def test_samples_are_images_of_the_test_set_with_their_classes(run: Training, idx_data: Path) -> None:
    found = samples(run.run_dir)
    test = load(idx_data).test
    assert test is not None
    assert [sample["kind"] for sample in found].count("even") == 12
    for sample in found:
        assert sample["true"] == str(int(test.labels[sample["index"]]))
        assert sample["name"] == f"image {sample['index']} of the test set"
        assert (pixels(sample) == test.images[sample["index"], 0].numpy()).all()
        assert 1 / 3 <= sample["probability"] <= 1, "of the class that it was taken for, the likeliest of three"


def test_errors_are_listed_by_confidence(run: Training) -> None:
    errors = [sample for sample in samples(run.run_dir) if sample["kind"] == "mistake"]
    assert all(sample["true"] != sample["predicted"] for sample in errors)
    sure = [sample["probability"] for sample in errors]
    assert sure == sorted(sure, reverse=True)
    with (run.run_dir / "final" / "confusion.csv").open(newline="") as file:
        confusion = {row["true class"]: row for row in csv.DictReader(file)}
    wrong = sum(int(confusion[one][other]) for one in "012" for other in "012" if one != other)
    assert len(errors) == min(12, wrong)


def test_photographs_are_scaled_down_and_corrupt_ones_left_out(start: Starter, tmp_path: Path) -> None:
    start.data = make_folder(tmp_path / "data")
    (start.data / "test" / "green" / "4.jpg").write_bytes(b"no image")
    found = samples(start.complete(*SHORT, "--image-size=128").run_dir)
    assert len(found) >= 12
    assert not any("green/4.jpg" in sample["name"] for sample in found)
    assert {pixels(sample).shape for sample in found} == {(96, 96, 3)}


def test_without_a_test_set_there_are_none(start: Starter, tmp_path: Path) -> None:
    start.data = make_folder(tmp_path / "data", parts=("train",))
    assert not (start.complete(*SHORT).run_dir / "final" / "samples.json").exists()
