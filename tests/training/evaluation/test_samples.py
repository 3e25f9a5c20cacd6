"""The sample predictions that a training leaves: honest ones, the same for any number of ranks."""

import base64
import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from support.trainings import Starter, load, make_folder

SHORT = ("--epochs=1", "--batch-size=20", "--lr=0.05")


def samples(run_dir: Path) -> list[dict[str, Any]]:
    return list(json.loads((run_dir / "final" / "samples.json").read_text()))


def pixels(sample: dict[str, Any]) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(base64.b64decode(sample["png"]))))


def test_samples_are_images_of_the_test_set_with_their_classes(start: Starter) -> None:
    found = samples(start.complete(*SHORT).run_dir)
    test = load(start.data).test
    assert test is not None
    assert [sample["kind"] for sample in found].count("even") == 12
    for sample in found:
        assert sample["true"] == str(int(test.labels[sample["index"]]))
        assert sample["name"] == f"image {sample['index']} of the test set"
        assert (pixels(sample) == test.images[sample["index"], 0].numpy()).all()
        assert 1 / 3 <= sample["probability"] <= 1, "of the class that it was taken for, the likeliest of three"


def test_errors_are_listed_by_confidence(start: Starter) -> None:
    run = start.complete(*SHORT).run_dir
    errors = [sample for sample in samples(run) if sample["kind"] == "mistake"]
    assert all(sample["true"] != sample["predicted"] for sample in errors)
    sure = [sample["probability"] for sample in errors]
    assert sure == sorted(sure, reverse=True)
    with (run / "final" / "confusion.csv").open(newline="") as file:
        confusion = {row["true class"]: row for row in csv.DictReader(file)}
    wrong = sum(int(confusion[one][other]) for one in "012" for other in "012" if one != other)
    assert len(errors) == min(12, wrong)


def test_samples_are_the_same_for_any_number_of_ranks(start: Starter) -> None:
    first = start.complete(*SHORT, run="1").run_dir
    for world_size in (2, 3):
        run = start.directory / str(world_size)
        shutil.copytree(first, run)
        shutil.rmtree(run / "final")
        start.complete(*SHORT, run=str(world_size), world_size=world_size)
        assert samples(run) == samples(first)


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
