"""Recognizes the layout of a data directory by the names of its files, or by its index if it is packed.

Runs on the login node and on every rank; imports no torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hpc.base.errors import UserError, pip_install
from hpc.base.files import expanded
from hpc.base.text import few, file_name
from training.config.packed_index import INDEX, check_files, read_index

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
# What file managers, file servers and file systems leave in directories and archives, in lower case. Other such names
# begin with a dot: .DS_Store, ._photo.jpg, .Trash-1000, .snapshot, .ipynb_checkpoints.
_NO_DATA = frozenset({
    *("__macosx", "icon\r", "network trash folder", "temporary items"),  # macOS
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "recycler", "system volume information"),  # Windows
    *("@eadir", "@recycle", "#recycle", "@tmp", "@__thumb", "#snapshot", "~snapshot", "@sharebin"),  # file servers
    *("lost+found", "lost.dir", "found.000"),  # repaired file systems
})  # fmt: skip


def is_ignored(name: str) -> bool:
    """Return whether a file or directory is no data, by its name: it is hidden, or a program has left it."""
    return name.startswith(".") or name.lower() in _NO_DATA


def is_image(name: str) -> bool:
    """Return whether a file's name has the suffix of an image and is not ignored."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not is_ignored(name)


def class_names(root: Path) -> list[str]:
    """Return the sorted names of the class directories in `root`."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if not is_ignored(entry.name) and entry.is_dir())


def holds_image(directory: str, *, below: bool = False) -> bool:
    """Return whether an image is in a directory or, if `below`, in it or in a directory below it.

    The search stops at the first image, so it is quick for huge directories.
    """
    inside = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file() and is_image(entry.name):
                return True
            if below and not is_ignored(entry.name) and entry.is_dir():
                inside.append(entry.path)
    return any(holds_image(path, below=True) for path in inside)


FASHION_MNIST = "fashion-mnist"
FASHION_MNIST_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
DIGITS, DIGITS_FILE = "digits", "digits.csv.gz"
NAMED_DATA = f"{FASHION_MNIST} or {DIGITS}"

# Directory names in lower case; Train/ and Validation/ are recognized, too.
_PART_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
IDX_STEMS = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}
_NOT_USED = "put them in class directories of train/, val/ or test/, or remove them"
Kind = Literal["idx", "digits", "cifar10", "cifar100", "image-folder", "packed"]


@dataclass(frozen=True, kw_only=True)
class CifarFiles:
    """The published names of the files of a CIFAR data set, and the keys of labels and class names in the files."""

    directory: str
    train: tuple[str, ...]
    test: str
    meta: str
    label_key: str
    names_key: str


CIFAR: dict[Kind, CifarFiles] = {
    "cifar10": CifarFiles(
        directory="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test="test_batch",
        meta="batches.meta",
        label_key="labels",
        names_key="label_names",
    ),
    "cifar100": CifarFiles(
        directory="cifar-100-python",
        train=("train",),
        test="test",
        meta="meta",
        label_key="fine_labels",
        names_key="fine_label_names",
    ),
}
LAYOUTS = (
    "class directories of images, or train/ (and val/ or validation/, and test/) with class directories, "
    "or the output of hpc pack, "
    "or IDX files such as train-images-idx3-ubyte.gz, or cifar-10-batches-py, or cifar-100-python"
)


@dataclass(frozen=True, kw_only=True)
class DataLayout:
    """The layout of a data directory, and the directories of its parts."""

    kind: Kind
    path: Path
    """Directory with all data, which is copied to the nodes."""
    train: Path
    """Directory with the class directories of an image folder; `path` for other kinds."""
    val: Path | None
    """Directory of the validation set; None if there is none, so that a part of the training set is held out."""
    test: Path | None
    """Directory of the test set; None if there is none."""


def resolve_data(name: str) -> Path:
    """Return --data as an absolute path.

    The name `fashion-mnist` means Debian's copy, and `digits` scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.
    Raises UserError if --data is one of these names, but its package is not installed.
    """
    if name == DIGITS:
        return _digits_directory()
    if name != FASHION_MNIST:
        return expanded(name).absolute()
    if not FASHION_MNIST_DIRECTORY.is_dir():
        raise UserError(
            f"--data is {FASHION_MNIST}, but {FASHION_MNIST_DIRECTORY} does not exist: "
            f"apt-get install dataset-fashion-mnist, give the directory with the four IDX files, or use --data {DIGITS}"
        )
    return FASHION_MNIST_DIRECTORY


def title_of(data: Path) -> str | None:
    """Return the title of a data set that `resolve_data` knows by name, or None for other data."""
    if data == FASHION_MNIST_DIRECTORY:
        return "Fashion-MNIST (60,000 images)"
    return "scikit-learn's handwritten digits (1,797 images)" if _digits_layout(data) else None


def _digits_directory() -> Path:
    package = find_spec("sklearn")  # an import would take a second
    for directory in (package.submodule_search_locations or ()) if package else ():
        if (path := Path(directory, "datasets", "data")).is_dir():
            return path
    raise UserError(
        f"--data is {DIGITS}, which are in scikit-learn, but that is not installed: type {pip_install('scikit-learn')}"
    )


def check_data(path: Path) -> DataLayout:
    """Return the layout of a data directory. The search stops at the first image, so it is quick for huge data.

    Raises UserError if the directory does not exist, cannot be read, or has no known layout.
    """
    try:
        if not path.exists():
            raise UserError(f"--data is {path}, which does not exist: give a directory, {NAMED_DATA}")
        if not path.is_dir():
            raise UserError(f"--data is {path}, which is not a directory: give the directory that holds the images")
        return (
            _packed_layout(path)
            or _idx_layout(path)
            or _digits_layout(path)
            or _cifar_layout(path)
            or _folder_layout(path)
        )
    except OSError as error:
        raise UserError(
            f"--data is {path}: {error.filename} cannot be read ({error.strerror}): make it readable"
        ) from error


def find_data(staged: Path) -> Path:
    """Return the data directory in a staged copy: the copy itself or, as in many archives, a directory in it."""
    try:
        return check_data(staged).path
    except UserError:
        return staged  # the reader of the data says what is wrong, or the storage does not answer for a moment


def _packed_layout(path: Path) -> DataLayout | None:
    if not (path / INDEX).exists():
        return None
    index = read_index(path)
    check_files(path, index)
    names = {part.name for part in index.parts}
    val, test = (path if name in names else None for name in ("val", "test"))
    return DataLayout(kind="packed", path=path, train=path, val=val, test=test)


def find_idx(directory: Path, stem: str) -> Path | None:
    """Return the path of an IDX file, plain or compressed, or None if neither exists."""
    candidates = (directory / stem, directory / f"{stem}.gz")
    return next((file for file in candidates if file.is_file()), None)


def _idx_layout(path: Path) -> DataLayout | None:
    present = {role: find_idx(path, stem) is not None for role, stem in IDX_STEMS.items()}
    if not any(present.values()):
        return None
    required = ["train_images", "train_labels"]
    if present["test_images"] or present["test_labels"]:
        required += ["test_images", "test_labels"]
    missing = [IDX_STEMS[role] for role in required if not present[role]]
    if missing:
        raise UserError(f"--data is {path}, which lacks {', '.join(missing)} (or .gz): add them")
    return DataLayout(kind="idx", path=path, train=path, val=None, test=path if present["test_images"] else None)


def _digits_layout(path: Path) -> DataLayout | None:
    is_there = (path / DIGITS_FILE).is_file()
    return DataLayout(kind="digits", path=path, train=path, val=None, test=path) if is_there else None


def _cifar_layout(path: Path) -> DataLayout | None:
    """Recognize CIFAR's files in the directory, or in a subdirectory with the published name."""
    places = ((kind, place) for kind, files in CIFAR.items() for place in (path, path / files.directory))
    published = [
        (kind, place)
        for kind, place in places
        if (place.name == CIFAR[kind].directory and place.is_dir())
        # Require several files: one file named `train` or `meta` does not make a CIFAR data set.
        or all((place / name).is_file() for name in (CIFAR[kind].train[0], CIFAR[kind].meta))
    ]
    if not published:
        return None
    if len(published) > 1:
        both = " and ".join(str(place) for _, place in published)
        raise UserError(f"--data is {path}, which has {both}: give one of them")
    kind, place = published[0]
    files = CIFAR[kind]
    missing = [name for name in (*files.train, files.test, files.meta) if not (place / name).is_file()]
    if missing:
        raise UserError(f"{place} lacks {', '.join(missing)}: add them")
    return DataLayout(kind=kind, path=place, train=place, val=None, test=place)


def _folder_layout(path: Path) -> DataLayout:
    parts = {name: _part(path, names) for name, names in _PART_NAMES.items()}
    train = parts["train"] or path
    classes = class_names(parts["train"] or path)
    if parts["train"] is None and len(classes) == 1:
        around = path / classes[0]  # as in many archives
        if not holds_image(str(around)) or _has_class_images(around) or _part(around, _PART_NAMES["train"]):
            return check_data(around)
    if not _has_class_images(train):
        raise UserError(f"--data is {path}, but there are no images in class directories below {train}: give {LAYOUTS}")
    val, test = (parts[name] if parts["train"] else None for name in ("val", "test"))
    for part in (val, test):
        if part and not _has_class_images(part):
            raise UserError(f"--data is {path}, but {part} holds no class directories with images: fill or remove it")
    return DataLayout(kind="image-folder", path=path, train=train, val=val, test=test)


def _part(path: Path, names: tuple[str, ...]) -> Path | None:
    """Return the directory with one of `names` that is a part of the data, such as the training set; else None.

    A directory of this name may be a class instead: a data set of vehicles may have a class `train`. It is a class if
    it holds images itself, and class directories beside it hold images, too. Raises UserError if several are parts.
    """
    named = [path / name for name in class_names(path) if name.lower() in names]
    parts = [
        directory
        for directory in named
        if not holds_image(str(directory)) or (_has_class_images(directory) and not _has_class_images(path))
    ]
    if len(parts) > 1:
        raise UserError(f"--data is {path}, which has {' and '.join(map(str, parts))}: keep only one of them")
    return parts[0] if parts else None


def _has_class_images(root: Path) -> bool:
    """Return whether a class directory in `root` holds an image. Those of parts, such as `test`, do not count."""
    parts = {name for names in _PART_NAMES.values() for name in names}
    names = (name for name in class_names(root) if name.lower() not in parts)
    return any(holds_image(str(root / name), below=True) for name in names)


def image_roots(layout: DataLayout) -> dict[str, Path]:
    """Return the directory with the class directories of each part of an image folder, by the part's name."""
    return {name: root for name in _PART_NAMES if (root := getattr(layout, name)) is not None}


def known_classes(layout: DataLayout, root: Path) -> set[str]:
    """Return the classes of the part of an image folder in `root`. Raises UserError if `train` lacks one."""
    present = set(class_names(root))
    if unknown := sorted(present.difference(class_names(layout.train))):
        raise UserError(
            f"{root / unknown[0]} is a class that the training set does not have: remove it, or add it to "
            f"{layout.train}"
        )
    return present


def check_classes(layout: DataLayout) -> list[str]:
    """Return a warning for each part of an image folder without images of a class, and for images that are not used.

    Raises UserError if a part of an image folder has a class that the training set lacks.
    """
    if layout.kind != "image-folder":
        return []  # `hpc pack` has warned of packed data; the ranks warn of all others
    warnings = list[str]()
    if layout.train != layout.path:
        beside = {layout.path / name for name in class_names(layout.path)} - set(image_roots(layout).values())
        unused = [str(directory) for directory in sorted(beside) if holds_image(str(directory), below=True)]
        warnings += [f"the images in {file_name(directory)} are not used: {_NOT_USED}" for directory in unused]
    for root in image_roots(layout).values():
        present = known_classes(layout, root)
        used = {name for name in present if holds_image(str(root / name), below=True)}
        if lacking := sorted(set(class_names(layout.train)) - used):
            warnings.append(no_images(str(root), lacking))
    return warnings


def no_images(where: str, classes: Sequence[str]) -> str:
    """Return the warning that a part of the data has no images of these classes."""
    what = "class" if len(classes) == 1 else "the classes"
    return f"{where} has no images of {what} {few([file_name(name) for name in classes])}: add some, or remove it"
