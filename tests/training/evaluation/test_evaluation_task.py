"""Which part of the data an evaluation takes, and how its labels become those of the model."""

from pathlib import Path

import pytest
import torch
from support.trainings import load, make_folder

from hpc.base.errors import UserError
from training.config.dataset_layout import check_data
from training.config.evaluation_task import EvaluationTask, choose_split
from training.engine.evaluation_run import labels_of_model


@pytest.mark.parametrize(
    ("parts", "other", "val_split", "chosen"),
    [
        (("train", "val", "test"), False, 0.1, "test"),
        (("train", "val"), False, 0.1, "val"),
        (("train",), False, 0.1, "val"),
        (("train", "val", "test"), True, 0.0, "test"),
        (("train",), True, 0.0, "train"),
    ],
)
def test_split_that_is_chosen(
    tmp_path: Path, parts: tuple[str, ...], other: bool, val_split: float, chosen: str
) -> None:
    layout = check_data(make_folder(tmp_path / "data", parts, per_class=1))
    assert choose_split(EvaluationTask(source="run", other_data=other), layout, val_split) == chosen


def test_split_that_the_data_do_not_have_is_refused(tmp_path: Path) -> None:
    layout = check_data(make_folder(tmp_path / "data", ("train",), per_class=1))
    with pytest.raises(UserError, match=r"--split is test, but .*: use train"):
        choose_split(EvaluationTask(source="run", split="test", other_data=True), layout, 0.0)
    with pytest.raises(UserError, match="neither a test set nor a validation set: use --split train"):
        choose_split(EvaluationTask(source="run"), layout, 0.0)


def test_labels_become_those_of_the_classes_of_the_same_name(tmp_path: Path) -> None:
    data = load(make_folder(tmp_path / "data", ("train",), per_class=2), val_split=0.0)
    assert data.classes == ("blue sky", "green", "red")
    found = labels_of_model(data.train.labels, data.classes, ("red", "black", "green", "blue sky"))
    assert found.tolist() == [3, 3, 2, 2, 0, 0]
    numbered = labels_of_model(data.train.labels, data.classes, ("0", "1", "2"))
    assert numbered.tolist() == data.train.labels.tolist(), "labels of IDX files have no names"
    with pytest.raises(UserError, match="classes that the model does not know: green; it was trained on"):
        labels_of_model(torch.zeros(1, dtype=torch.int64), data.classes, ("red", "blue sky"))
