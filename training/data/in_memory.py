"""Reads data sets that fit in memory: IDX files (the MNIST family), scikit-learn's digits, CIFAR-10 and CIFAR-100.

Runs on every rank; needs no torchvision.
"""

import gzip
import pickle
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc.base.errors import UserError
from training.config.dataset_layout import CIFAR, DIGITS_FILE, IDX_STEMS, Kind, check_data, find_data, find_idx

# The function of numpy that pickled arrays call. Its name is private.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
# Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017) is recognized by the CRC of its training labels: the format has no
# field for class names.
_FASHION_MNIST_CRC = 0x2ED6E46A
_FASHION_MNIST = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"

_kept = dict[Path, Tensor]()


def keep_data() -> None:
    """Read the IDX files in this process's `--data` into memory, for the ranks that it forks.

    It does not call `read_idx_pair`, whose tensor operations start threads: none may run before a fork. Raises OSError
    if the directory cannot be read; or UserError if the directory has no known layout, or a file is damaged.
    """
    argument = next((word for word in sys.argv if word.startswith("--data=")), None)
    if argument is None:
        return
    layout = check_data(find_data(Path(argument.removeprefix("--data="))))
    if layout.kind == "idx":
        parts = ("train", "test") if layout.test else ("train",)
        _kept.update({path: read_idx(path) for part in parts for path in _files(layout.path, part)})


def _files(directory: Path, part: str) -> list[Path]:
    """Return the IDX files of the images and the labels of a part, `train` or `test`."""
    stems = (IDX_STEMS[f"{part}_{role}"] for role in ("images", "labels"))
    return [find_idx(directory, stem) or directory / stem for stem in stems]


def read_idx(path: Path) -> Tensor:
    """Return the uint8 tensor in an IDX file (http://yann.lecun.com/exdb/mnist/), plain or compressed.

    The format: two zero bytes, a type (8: unsigned byte), the number of dimensions, each dimension as a big-endian
    32-bit number, then the data. Raises UserError if the file is damaged, or not an IDX file of unsigned bytes.
    """
    if path in _kept:
        return _kept[path]
    try:
        raw = path.read_bytes()
        # Use writable memory, because torch warns about tensors on read-only memory.
        data = bytearray(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): replace it") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise UserError(f"{path} is not an IDX file of unsigned bytes (it begins with {data[:4].hex()}): replace it")
    header = 4 + 4 * data[3]
    shape = [int.from_bytes(data[place : place + 4], "big") for place in range(4, header, 4)]
    values = torch.frombuffer(data, dtype=torch.uint8)[header:]
    if values.numel() != torch.Size(shape).numel():
        raise UserError(f"{path} holds {values.numel()} bytes of data where its header says {shape}: replace it")
    return values.reshape(shape)


def read_idx_pair(directory: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return images (uint8 [n, C, H, W]) and labels (int64 [n]) of a part, `train` or `test`.

    Raises UserError if a file is missing or damaged, or the two files do not belong together.
    """
    files = _files(directory, part)
    images, labels = map(read_idx, files)
    if images.dim() == 3:
        images = images.unsqueeze(1)
    if images.dim() != 4 or labels.dim() != 1 or len(images) != len(labels):
        raise UserError(f"{files[0]} is {list(images.shape)} and {files[1]} is {list(labels.shape)}: not a pair")
    if not images.numel():
        raise UserError(f"{files[0]} is {list(images.shape)}, which is not an image: replace it")
    return images, labels.long()


def class_names(train_labels: Tensor, count: int) -> tuple[str, ...]:
    """Return Fashion-MNIST's class names if the labels are Fashion-MNIST's, or else the class numbers as texts."""
    crc = zlib.crc32(train_labels.to(torch.uint8).numpy().tobytes())
    return tuple(_FASHION_MNIST.split(",")) if crc == _FASHION_MNIST_CRC else tuple(map(str, range(count)))


# The digits are the test part of Alpaydin and Kaynak, "Optical recognition of handwritten digits" (UCI, 1998). The last
# 360 are our test set: most of the digits before them were written by other people.
_DIGITS_TESTED = 360


def read_digits(directory: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return images (uint8 [n, 1, 8, 8]) and labels (int64 [n]) of a part, `train` or `test`, of scikit-learn's digits.

    Each line of the file has 64 values from 0 to 16, and the label. Raises UserError if the file is damaged.
    """
    path = directory / DIGITS_FILE
    try:
        lines = np.loadtxt(path, delimiter=",", dtype=np.uint8, ndmin=2)
        images, labels = lines[:, :64].reshape(-1, 1, 8, 8), lines[:, 64]
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): install scikit-learn again") from error
    chosen = slice(-_DIGITS_TESTED) if part == "train" else slice(-_DIGITS_TESTED, None)
    brightness = images[chosen].astype(np.uint16) * 255 // 16
    return torch.from_numpy(brightness.astype(np.uint8)), torch.from_numpy(labels[chosen].astype(np.int64))


_SIDE = 32
# Pickles of numpy 1 have the first module name, and pickles of numpy 2 have the second.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArraysOnly(pickle.Unpickler):
    """Loads only arrays of numbers, because a pickle can make its reader call any function."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it calls {module_name}.{global_name}, which is not allowed") from None


def read_cifar(directory: Path, kind: Kind, part: str, classes: int) -> tuple[Tensor, Tensor]:
    """Return images (uint8 [n, 3, 32, 32]) and labels (int64 [n], CIFAR-100's fine ones) of part `train` or `test`.

    The files (https://www.cs.toronto.edu/~kriz/cifar.html) are pickles of dictionaries. Raises UserError if a file is
    missing, damaged, or not a CIFAR file.
    """
    files = CIFAR[kind]
    names = files.train if part == "train" else (files.test,)
    pairs = [_images_and_labels(directory / name, files.label_key, classes) for name in names]
    images, labels = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return torch.from_numpy(images).reshape(-1, 3, _SIDE, _SIDE), torch.from_numpy(labels)


def read_cifar_names(directory: Path, kind: Kind) -> tuple[str, ...]:
    """Return the class names. Raises UserError if the file is missing, damaged, or not a CIFAR file."""
    path = directory / CIFAR[kind].meta
    names = _read_pickle(path).get(CIFAR[kind].names_key)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} has no {CIFAR[kind].names_key}: copy the data again")
    return tuple(names)


def _images_and_labels(path: Path, label_key: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    content = _read_pickle(path)
    images, labels = content.get("data"), content.get(label_key)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (3 * _SIDE**2,):
        raise UserError(f"{path} has no images of {_SIDE} x {_SIDE} pixels: copy the data again")
    if not isinstance(labels, list) or not all(isinstance(label, int) and 0 <= label < classes for label in labels):
        raise UserError(f"{path} has no {label_key} from 0 to {classes - 1}: copy the data again")
    if len(images) != len(labels):
        raise UserError(f"{path} has {len(images)} images and {len(labels)} labels: copy the data again")
    return images, np.array(labels, dtype=np.int64)


def _read_pickle(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            return dict(_ArraysOnly(file, encoding="latin1").load())
    except Exception as error:  # unpickling a damaged file may raise any error
        raise UserError(f"{path} cannot be read ({error}): copy the data again") from error
