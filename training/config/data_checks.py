"""Checks the data of a training before anything is queued. Runs on the login node.

Each check raises UserError with the flag, its value, and what to type.
"""

import posixpath
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from hpc.base.errors import TorchrelayError, UserError
from hpc.sources import archive
from hpc.sources.source_files import inside_name, is_archive
from training.config.dataset_layout import check_classes, check_data, is_image, resolve_data
from training.config.packed_index import INDEX
from training.config.rules import check_validation
from training.config.train_config import TrainConfig

# Files of an archive, other than images, whose names are checked: IDX and CIFAR data sets have fewer.
_MOST_OTHER_FILES = 1000


def training_data(train: TrainConfig) -> Path | None:
    """Return the archive or directory to stage for the classifier; None for synthetic data."""
    if train.synthetic:
        check_validation(train, validates=False)
        return None
    data = resolve_data(train.data)
    if is_archive(data):
        return archive.checked(data)
    layout = check_data(data)
    check_validation(train, validates=layout.val is not None or train.val_split > 0)
    return layout.path


def class_warnings(train: TrainConfig) -> list[str]:
    """Return a warning for each part of the data that has no images of a class. In archives, names are checked.

    Raises UserError if val or test has a class that the training set lacks, or an archive has no known layout.
    """
    if train.synthetic:
        return []
    data = resolve_data(train.data)
    if not is_archive(data):
        return check_classes(check_data(data))
    try:
        names = archive.quick_names(data)
        if not names or any(posixpath.basename(name) == INDEX for name in names):
            return []
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory).resolve()
            _make_tree(root, names)
            try:
                return [warning.replace(str(root), str(data)) for warning in check_classes(check_data(root))]
            except UserError as error:
                raise UserError(str(error).replace(str(root), str(data))) from error
    except UserError:
        raise
    except (TorchrelayError, OSError, ValueError):
        return []  # the nodes say what is wrong with the archive


def _make_tree(root: Path, names: Sequence[str]) -> None:
    """Make the directories of an archive below `root`, and empty files for an image of each and for other files."""
    images = dict[str, str]()
    others = list[str]()
    directories = set[str]()
    for name in names:
        path = inside_name(name) if PurePosixPath(name).parts else "."
        directory = path if name.endswith("/") else posixpath.dirname(path)
        directories.add(directory)
        if is_image(posixpath.basename(path)):
            images[directory] = path
        elif directory != path and len(others) < _MOST_OTHER_FILES:
            others.append(path)
    for directory in directories:
        (root / directory).mkdir(parents=True, exist_ok=True)
    for path in (*images.values(), *others):
        (root / path).touch()
