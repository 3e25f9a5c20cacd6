"""Reads IDX files, the format of the MNIST family, plain or compressed. Runs on every rank; needs no torchvision.

The format: two zero bytes, a type (8: unsigned byte), the number of dimensions, each dimension as a big-endian
32-bit number, then the data (http://yann.lecun.com/exdb/mnist/).
"""

import gzip
import zlib
from pathlib import Path

import torch
from torch import Tensor

from hpc.core.errors import UserError
from training.config.dataset_layout import IDX_STEMS, find_idx

# Fashion-MNIST: Xiao, Rasul and Vollgraf, 2017. The format has no field for names, so the data set is recognised by the
# CRC of its training labels.
_FASHION_MNIST_CRC = 0x2ED6E46A
_FASHION_MNIST = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


def read_idx(path: Path) -> Tensor:
    """The uint8 tensor in an IDX file.

    Raises:
        UserError: the file is torn, or is no IDX file of unsigned bytes.
    """
    data = _read(path)
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise UserError(f"{path} is not an IDX file of unsigned bytes (it begins with {data[:4].hex()}): replace it")
    header = 4 + 4 * data[3]
    shape = [int.from_bytes(data[place : place + 4], "big") for place in range(4, header, 4)]
    values = torch.frombuffer(data, dtype=torch.uint8)[header:]
    if values.numel() != torch.Size(shape).numel():
        raise UserError(f"{path} holds {values.numel()} bytes of data where its header says {shape}: replace it")
    return values.reshape(shape)


def _read(path: Path) -> bytearray:
    """The uncompressed content, writable because torch warns about tensors on read-only memory."""
    try:
        raw = path.read_bytes()
        return bytearray(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): replace it") from error


def read_idx_pair(directory: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images (uint8 [n, 1, H, W] or [n, C, H, W]) and labels (int64 [n]) of a part, `train` or `test`.

    Raises:
        UserError: a file is missing or torn, or the two do not belong together.
    """
    files = [_existing(directory, IDX_STEMS[f"{part}_{role}"]) for role in ("images", "labels")]
    images, labels = map(read_idx, files)
    if images.dim() == 3:
        images = images.unsqueeze(1)
    if images.dim() != 4 or labels.dim() != 1 or len(images) != len(labels):
        raise UserError(f"{files[0]} is {list(images.shape)} and {files[1]} is {list(labels.shape)}: not a pair")
    if not images.numel():
        raise UserError(f"{files[0]} is {list(images.shape)}, which is no image: replace it")
    return images, labels.long()


def _existing(directory: Path, stem: str) -> Path:
    path = find_idx(directory, stem)
    if path is None:
        raise UserError(f"{directory / stem} (or .gz) does not exist: copy the data again")
    return path


def class_names(train_labels: Tensor, count: int) -> tuple[str, ...]:
    """The names of the classes: those of Fashion-MNIST, else the numbers."""
    crc = zlib.crc32(train_labels.to(torch.uint8).numpy().tobytes())
    return tuple(_FASHION_MNIST.split(",")) if crc == _FASHION_MNIST_CRC else tuple(map(str, range(count)))
