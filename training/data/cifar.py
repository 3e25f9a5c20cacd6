"""Reads CIFAR-10 and CIFAR-100 in their Python version. Runs on every rank; needs no torchvision.

The files (https://www.cs.toronto.edu/~kriz/cifar.html) are pickles of dictionaries, and a pickle can make its reader
call any function. This reader allows the three names that an array of numbers needs and refuses all others.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct  # pickled arrays refer to it
from torch import Tensor

from hpc.core.errors import UserError
from training.config.dataset_layout import CIFAR, Kind

_CHANNELS, _SIDE = 3, 32
# numpy 1 pickled the old module name, numpy 2 pickles the new one.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        """Look up a name in the list of allowed ones."""
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it calls {module_name}.{global_name}, which is not allowed") from None


def read_cifar(directory: Path, kind: Kind, part: str, classes: int) -> tuple[Tensor, Tensor]:
    """Images (uint8 [n, 3, 32, 32]) and labels (int64 [n]; CIFAR-100's fine ones) of a part, `train` or `test`.

    Raises:
        UserError: a file is missing or torn, or is something else.
    """
    files = CIFAR[kind]
    names = files.train if part == "train" else (files.test,)
    pairs = [_images_and_labels(directory / name, files.label_key, classes) for name in names]
    images, labels = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return torch.from_numpy(images).reshape(-1, _CHANNELS, _SIDE, _SIDE), torch.from_numpy(labels)


def read_cifar_names(directory: Path, kind: Kind) -> tuple[str, ...]:
    """The names of the classes.

    Raises:
        UserError: the file is missing or torn, or is something else.
    """
    path = directory / CIFAR[kind].meta
    names = _read(path).get(CIFAR[kind].names_key)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} has no {CIFAR[kind].names_key}: copy the data again")
    return tuple(names)


def _images_and_labels(path: Path, label_key: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    content = _read(path)
    images, labels = content.get("data"), content.get(label_key)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (_CHANNELS * _SIDE**2,):
        raise UserError(f"{path} has no images of {_SIDE} x {_SIDE} pixels: copy the data again")
    if not isinstance(labels, list) or not all(isinstance(label, int) and 0 <= label < classes for label in labels):
        raise UserError(f"{path} has no {label_key} from 0 to {classes - 1}: copy the data again")
    if len(images) != len(labels):
        raise UserError(f"{path} has {len(images)} images and {len(labels)} labels: copy the data again")
    return images, np.array(labels, dtype=np.int64)


def _read(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="latin1").load()
    except Exception as error:  # unpickling a torn file raises nearly everything
        raise UserError(f"{path} cannot be read ({error}): copy the data again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no dictionary: copy the data again")
    return content
