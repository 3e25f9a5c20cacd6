import shutil
from pathlib import Path

import pytest
from support.trainings import make_folder, make_idx

from hpc.base.errors import UserError
from training.config.data_checks import class_warnings
from training.config.train_config import TrainConfig


def warnings_of(data: Path) -> list[str]:
    return class_warnings(TrainConfig(data=str(data)))


@pytest.mark.parametrize("kind", ["zip", "gztar"])
def test_classes_of_an_archive_are_checked_by_its_names(tmp_path: Path, kind: str) -> None:
    data = make_folder(tmp_path / "flowers", per_class=2)
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "__MACOSX" / "._0.jpg").touch()
    (data / "train" / "violet").mkdir()

    def archived(name: str) -> Path:
        return Path(shutil.make_archive(str(tmp_path.with_name(name)), kind, tmp_path))

    some = archived("some")
    [of_train, *others] = warnings_of(some)
    assert of_train == f"{some}/flowers/train has no images of class violet: add some, or remove it"
    assert len(others) == 2
    (data / "val" / "black").mkdir()
    unknown = archived("unknown")
    with pytest.raises(UserError, match=f"{unknown}/flowers/val/black is a class that the training set does not have"):
        warnings_of(unknown)
    shutil.rmtree(data)
    make_idx(tmp_path / "idx")
    assert warnings_of(archived("idx")) == []
    shutil.rmtree(tmp_path / "idx")
    (tmp_path / "notes.txt").touch()
    notes = archived("notes")
    with pytest.raises(UserError, match=f"--data is {notes}, but there are no images in class .* below {notes}: give"):
        warnings_of(notes)
