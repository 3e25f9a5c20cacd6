"""Owns the format of a file of tensors: safetensors, with the place of each shard in its whole tensor. On every rank.

torch's distributed checkpoints (DCP) read a directory of such files with their HuggingFaceStorageReader. Neither
safetensors nor numpy is used, because the environment of a user's script may lack them.
"""

from __future__ import annotations  # torch is imported only when a function is called

import hashlib
import json
import math
import mmap
import os
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from .shards import Block, Part, copy_common

if TYPE_CHECKING:
    from torch import Tensor, dtype

# Keys that DCP's HuggingFaceStorageReader expects.
_SHARDS, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_METADATA = "__metadata__"
_ALIGNMENT, _CHUNK_BYTES = 64, 2**24
# Names of dtypes in safetensors.
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_NAMES = {short: name for name, short in _DTYPES.items()}
TENSOR_FILES = "state*.safetensors"
"""Pattern of the names of a state's files of tensors."""


def has_name(kind: dtype) -> bool:
    """Return whether a file can hold tensors of a dtype."""
    return str(kind).removeprefix("torch.") in _DTYPES


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of a file, by name, with the dtype and block of each. Two equal layouts fit the same file."""

    tensors: Mapping[str, tuple[dtype, Block]]

    @classmethod
    def of(cls, parts: Mapping[str, Part]) -> Self:
        """Return the layout for what a rank holds."""
        return cls({name: (part.tensor.dtype, part.block) for name, part in parts.items()})

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """For each tensor, where its bytes begin and end in the data. Large elements come first, so all are aligned."""
        places, end = dict[str, tuple[int, int]](), 0
        for name, (kind, block) in sorted(self.tensors.items(), key=lambda one: (-one[1][0].itemsize, one[0])):
            begin, end = end, end + math.prod(block.shape) * kind.itemsize
            places[name] = begin, end
        return places

    @cached_property
    def header(self) -> bytes:
        """The bytes before the data."""
        entries: dict[str, Any] = {
            name: {
                "dtype": _DTYPES[str(self.tensors[name][0]).removeprefix("torch.")],
                "shape": self.tensors[name][1].shape,
                "data_offsets": place,
            }
            for name, place in self.places.items()
        }
        if any(not block.is_whole for _, block in self.tensors.values()):
            offsets = {name: {_OFFSETS: block.offset} for name, (_, block) in self.tensors.items()}
            shapes = {name: block.whole for name, (_, block) in self.tensors.items()}
            entries[_METADATA] = {_SHARDS: json.dumps(offsets), "shapes": json.dumps(shapes)}
        text = json.dumps(entries).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def size_bytes(self) -> int:
        """The bytes of the file."""
        return len(self.header) + sum(end - begin for begin, end in self.places.values())


class Image:
    """The bytes of a file of tensors in memory: the file itself, mapped, or memory that belongs to no file."""

    def __init__(self, size_bytes: int, file: Path | None = None) -> None:
        """Make the file, unless `file` is None. Raises OSError if the memory or the file system is full."""
        import torch

        self.size_bytes = size_bytes
        self.is_new = True
        """Whether nothing was copied to it yet. The first copy takes longer: the kernel has to provide the memory."""
        self.tensors: dict[str, Tensor] = {}
        """The tensors of its layout by name: views of the bytes."""
        self._layout: TensorLayout | None = None
        self._inode: int | None = None
        if file is None:
            self._memory = mmap.mmap(-1, size_bytes)
        else:
            with file.open("xb+") as opened:
                # With its full size: if the node's memory were full, a write to a hole in a mapped file would kill the
                # process. (So would any write on a full disk of Btrfs or ZFS, which copy on write.)
                os.posix_fallocate(opened.fileno(), 0, size_bytes)
                self._memory = mmap.mmap(opened.fileno(), size_bytes)
                self._inode = os.fstat(opened.fileno()).st_ino
        with torch.inference_mode(mode=False):  # a tensor that is made in inference mode cannot be changed outside
            self.data = torch.frombuffer(self._memory, dtype=torch.uint8)
        """The bytes."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
            _pin(self.data)

    def is_at(self, path: Path) -> bool:
        """Return whether this is the memory of the file at a path: somebody may have removed it."""
        try:
            return path.stat().st_ino == self._inode
        except OSError:
            return False

    def fill(self, layout: TensorLayout, parts: Mapping[str, Part]) -> None:
        """Copy tensors to the bytes. From a GPU, the copy is made in the current stream; the host may not wait."""
        import torch

        if layout != self._layout:
            first = len(layout.header)
            self._memory[:first] = layout.header
            with torch.inference_mode(mode=False):  # as for the bytes
                self.tensors = {
                    name: self.data[first + begin : first + end].view(kind).view(block.shape)
                    for name, (begin, end) in layout.places.items()
                    for kind, block in [layout.tensors[name]]
                }
            self._layout = layout
        with torch.no_grad():
            for name, part in parts.items():
                self.tensors[name].copy_(part.tensor, non_blocking=True)
        self.is_new = False

    def write(self, file: Path, names: Collection[str]) -> dict[str, Any]:
        """Write some of the tensors to another file, and return the manifest's entry for it. Raises OSError."""
        layout = self._layout or TensorLayout({})
        chosen = TensorLayout({name: each for name, each in layout.tensors.items() if name in names})
        digest, first = hashlib.sha256(chosen.header), len(layout.header)
        with file.open("xb") as opened, memoryview(self._memory) as content:
            opened.write(chosen.header)
            for name in chosen.places:
                begin, end = (first + place for place in layout.places[name])
                for position in range(begin, end, _CHUNK_BYTES):
                    with content[position : min(end, position + _CHUNK_BYTES)] as chunk:
                        digest.update(chunk)
                        opened.write(chunk)
        return {"size": chosen.size_bytes, "sha256": digest.hexdigest()}


def _pin(data: Tensor) -> None:
    """Let the GPU copy to memory while the host goes on. Without this, the host waits for each copy."""
    import torch

    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own
    if int(runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0)) == 0:
        weakref.finalize(data, runtime.cudaHostUnregister, data.data_ptr())


def dtype_named(text: str) -> dtype:
    """Return the dtype of a name such as `torch.float32`."""
    import torch

    found: dtype = getattr(torch, text.removeprefix("torch."))
    return found


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor, or a shard of one, in a file."""

    file: Path
    kind: dtype
    block: Block
    begin: int = field(repr=False)
    """Position of the first byte in the file."""

    def read(self, wanted: Block | None = None) -> tuple[Tensor, Block]:
        """Read the rows (of the first dimension) that another block needs, or all. Returns them, and which block it is.

        The whole file is not mapped: if the storage failed, a read of mapped memory would kill the process.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is too short.
        """
        import torch

        block, skipped = self.block, 0
        common = block.common(wanted) if wanted and block.shape else None
        if common:
            first, last = common[0][0], common[1][0]
            skipped = first - block.offset[0]
            block = Block(offset=(first, *block.offset[1:]), shape=(last - first, *block.shape[1:]), whole=block.whole)
        row_bytes = math.prod(block.shape[1:]) * self.kind.itemsize
        data = bytearray(math.prod(block.shape) * self.kind.itemsize)
        with self.file.open("rb", buffering=0) as opened:
            opened.seek(self.begin + skipped * row_bytes)
            _read_into(opened, data)
        # An empty buffer is refused by frombuffer.
        content = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return content.view(self.kind).view(block.shape), block


def _read_into(file: IO[bytes], data: bytearray) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(data):
            count = file.readinto(view[done:])  # type: ignore[attr-defined]  # of a file without a buffer
            if not count:
                raise ValueError(f"{file.name} is too short")
            done += count


def saved_tensors(file: Path) -> dict[str, SavedTensor]:
    """Return the tensors of a file by name, without their content.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged.
    """
    import torch

    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(size))
    metadata = entries.pop(_METADATA, {})
    offsets, shapes = json.loads(metadata.get(_SHARDS, "{}")), json.loads(metadata.get("shapes", "{}"))
    found = dict[str, SavedTensor]()
    for name, entry in entries.items():
        shape = tuple(entry["shape"])
        offset = tuple(offsets.get(name, {}).get(_OFFSETS, (0,) * len(shape)))
        block = Block(offset=offset, shape=shape, whole=tuple(shapes.get(name, shape)))
        kind = getattr(torch, _NAMES[entry["dtype"]])
        found[name] = SavedTensor(file=file, kind=kind, block=block, begin=8 + size + entry["data_offsets"][0])
    return found


def read_whole(parts: list[SavedTensor]) -> Tensor:
    """Read a tensor from the files of its shards; the only one is read as it is.

    Raises:
        OSError: a file cannot be read.
        ValueError: the files lack elements of the tensor.
    """
    import torch

    [first, *others] = parts
    if not others:
        return first.read()[0]
    whole = first.block.as_whole
    return read_part(Part(tensor=torch.empty(whole.shape, dtype=first.kind), block=whole), parts)


def read_part(target: Part, parts: list[SavedTensor]) -> Tensor:
    """Read a part of a tensor from the files of shards, into its memory, and return it.

    Raises:
        OSError: a file cannot be read.
        ValueError: the files lack elements of the part.
    """
    missing = target.tensor.numel()
    for each in {each.block: each for each in parts}.values():
        if each.block.common(target.block):
            missing -= copy_common(target, *each.read(target.block))
    if missing > 0:
        raise ValueError(f"{missing} elements of a tensor are in no file")
    return target.tensor
