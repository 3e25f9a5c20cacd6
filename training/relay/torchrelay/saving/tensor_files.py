"""Owns the format of a file of tensors: safetensors, with the place of each shard in its whole tensor. On every rank.

torch's distributed checkpoints (DCP) read a directory of such files with their HuggingFaceStorageReader. The package
safetensors is not used: it writes no shards, and no file in place, as a snapshot in mapped memory is written. Besides,
the environment of a user's script may lack it, and numpy.
"""

from __future__ import annotations  # torch is imported only when a function is called

import hashlib
import json
import math
import mmap
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from torch import Tensor, dtype


Numbers = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a tensor: the whole tensor, or the shard of a rank."""

    offset: Numbers
    """Where the block begins in the whole tensor, in each dimension."""
    shape: Numbers
    whole: Numbers
    """The shape of the whole tensor."""

    @property
    def is_whole(self) -> bool:
        """Whether the block is the whole tensor."""
        return self.shape == self.whole

    def common_size(self, other: Block) -> int:
        """Return the number of elements that two blocks of a tensor share."""
        common = self.common(other)
        return math.prod(last - first for first, last in zip(*common, strict=True)) if common else 0

    def common(self, other: Block) -> tuple[Numbers, Numbers] | None:
        """Return where the part that two blocks of a tensor share begins and ends; None if they share nothing."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = [[at + size for at, size in zip(each.offset, each.shape, strict=True)] for each in (self, other)]
        end = tuple(map(min, *ends))
        return None if any(first >= last for first, last in zip(begin, end, strict=True)) else (begin, end)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank holds of a tensor of the state."""

    tensor: Tensor
    """On the rank's device; its shape is the block's."""
    block: Block


def is_sharded(value: Any) -> bool:
    """Return whether a tensor is distributed over ranks: a DTensor, or a ShardedTensor of FSDP1. All ranks agree."""
    return hasattr(value, "to_local") or hasattr(value, "local_shards")


def part_of(value: Any) -> Part:
    """Return what this rank holds of a tensor, which may be sharded (DTensor, or ShardedTensor of FSDP1).

    Raises ValueError if the tensor is sharded in a way that is not supported.
    """
    if hasattr(value, "local_shards"):
        return _part_of_sharded_tensor(value)
    if not hasattr(value, "to_local"):
        shape = tuple(value.shape)
        return Part(tensor=value.detach(), block=Block(offset=(0,) * len(shape), shape=shape, whole=shape))
    if any(placement.is_partial() for placement in value.placements):
        raise ValueError("it is a DTensor with sums that are not reduced yet (Partial)")
    local = value.to_local().detach()
    [chunk, *_] = value.__create_chunk_list__()  # what torch's distributed checkpoints use; read in torch 2.6 to 2.15
    return Part(tensor=local, block=_block(chunk.offsets, local, value))


def _part_of_sharded_tensor(value: Any) -> Part:
    import torch

    shards = value.local_shards()
    if len(shards) > 1:
        raise ValueError("a rank holds several shards of it")
    if shards:
        local = shards[0].tensor.detach()
        return Part(tensor=local, block=_block(shards[0].metadata.shard_offsets, local, value))
    shape = (0, *value.shape[1:])
    return Part(tensor=torch.empty(shape, dtype=value.dtype), block=_block([0] * len(shape), torch.empty(shape), value))


def _block(offset: Sequence[int], local: Tensor, whole: Any) -> Block:
    return Block(offset=tuple(offset), shape=tuple(local.shape), whole=tuple(whole.shape))


def copy_common(target: Part, source: Tensor, block: Block) -> int:
    """Copy to a part what a block of the same tensor, with the content `source`, has of it. Returns the elements."""
    common = target.block.common(block)
    if common is None:
        return 0
    begin, end = common

    def cut(tensor: Tensor, offset: Numbers) -> Tensor:
        return tensor[tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offset, strict=True))]

    into = cut(target.tensor, target.block.offset)
    into.copy_(cut(source, block.offset))
    return into.numel()


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


def dtype_named(text: str) -> dtype:
    """Return the dtype of a name such as `torch.float32`."""
    import torch

    found: dtype = getattr(torch, text.removeprefix("torch."))
    return found


class SavedTensor(NamedTuple):
    """A tensor, or a shard of one, in a file."""

    kind: dtype
    block: Block
    begin: int
    """Position of its first byte, counted from the end of the header."""
    end: int
    """Position after its last byte."""


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of a file, by name. Two equal layouts fit the same file."""

    tensors: Mapping[str, SavedTensor]

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[dtype, Block]]) -> Self:
        """Return the layout for tensors. Large elements come first, so all are aligned."""
        saved, end = dict[str, SavedTensor](), 0
        for name, (kind, block) in sorted(tensors.items(), key=lambda one: (-one[1][0].itemsize, one[0])):
            begin, end = end, end + math.prod(block.shape) * kind.itemsize
            saved[name] = SavedTensor(kind, block, begin, end)
        return cls(saved)

    @classmethod
    def parse(cls, header: bytes) -> Self:
        """Return the layout that a header describes. Raises ValueError or KeyError if the header is damaged."""
        entries = json.loads(header[8:])
        metadata = entries.pop(_METADATA, {})
        offsets, shapes = json.loads(metadata.get(_SHARDS, "{}")), json.loads(metadata.get("shapes", "{}"))
        saved = dict[str, SavedTensor]()
        for name, entry in entries.items():
            shape = tuple(entry["shape"])
            offset = tuple(offsets.get(name, {}).get(_OFFSETS, (0,) * len(shape)))
            block = Block(offset=offset, shape=shape, whole=tuple(shapes.get(name, shape)))
            saved[name] = SavedTensor(dtype_named(_NAMES[entry["dtype"]]), block, *entry["data_offsets"])
        return cls(saved)

    @cached_property
    def header(self) -> bytes:
        """The bytes before the data."""
        entries: dict[str, Any] = {
            name: {
                "dtype": _DTYPES[str(saved.kind).removeprefix("torch.")],
                "shape": saved.block.shape,
                "data_offsets": (saved.begin, saved.end),
            }
            for name, saved in self.tensors.items()
        }
        if any(not saved.block.is_whole for saved in self.tensors.values()):
            offsets = {name: {_OFFSETS: saved.block.offset} for name, saved in self.tensors.items()}
            shapes = {name: saved.block.whole for name, saved in self.tensors.items()}
            entries[_METADATA] = {_SHARDS: json.dumps(offsets), "shapes": json.dumps(shapes)}
        text = json.dumps(entries).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def size_bytes(self) -> int:
        """The bytes of the file."""
        return len(self.header) + max((saved.end for saved in self.tensors.values()), default=0)


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
                    name: self.data[first + saved.begin : first + saved.end].view(saved.kind).view(saved.block.shape)
                    for name, saved in layout.tensors.items()
                }
            self._layout = layout
        with torch.no_grad():
            for name, part in parts.items():
                self.tensors[name].copy_(part.tensor, non_blocking=True)
        self.is_new = False

    def write(self, file: Path, names: Collection[str]) -> dict[str, Any]:
        """Write some of the tensors to another file, and return the manifest's entry for it. Raises OSError."""
        layout = self._layout or TensorLayout({})
        chosen = TensorLayout.of({name: (layout.tensors[name].kind, layout.tensors[name].block) for name in names})
        digest, first = hashlib.sha256(chosen.header), len(layout.header)
        with file.open("xb") as opened, memoryview(self._memory) as content:
            opened.write(chosen.header)
            for name in chosen.tensors:
                end = first + layout.tensors[name].end
                for position in range(first + layout.tensors[name].begin, end, _CHUNK_BYTES):
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


class TensorFile:
    """A file of tensors that is read."""

    def __init__(self, path: Path, header: bytes | None = None) -> None:
        """`header` is that of the file, if it is known; else, it is read.

        Raises OSError if the file cannot be read, or ValueError or KeyError if the file is damaged.
        """
        self._path = path
        if header is None:
            with path.open("rb") as opened:
                size = opened.read(8)
                header = size + opened.read(int.from_bytes(size, "little"))
        self.header = header
        self.tensors = TensorLayout.parse(self.header).tensors

    def read(self, name: str) -> Tensor:
        """Read a block of a tensor. Raises OSError if the file cannot be read, or ValueError if it is too short."""
        import torch

        saved = self.tensors[name]
        data = bytearray(saved.end - saved.begin)
        # The whole file is not mapped: if the storage failed, a read of mapped memory would kill the process.
        with self._path.open("rb") as opened:
            opened.seek(len(self.header) + saved.begin)
            if opened.readinto(data) < len(data):
                raise ValueError(f"{self._path} is too short")
        # An empty buffer is refused by frombuffer.
        content = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return content.view(saved.kind).view(saved.block.shape)

    def read_into(self, target: Part, name: str) -> int:
        """Read what the file has of a part of a tensor into its memory. Returns the number of elements."""
        block = self.tensors[name].block
        return copy_common(target, self.read(name), block) if block.common(target.block) else 0


def read_whole_tensors(directory: Path) -> dict[str, Tensor]:
    """Read the tensors of a state by name, each from the files of its shards.

    Raises OSError if a file cannot be read; or ValueError if a file is damaged, or the files lack elements of a tensor.
    """
    import torch

    found: dict[str, Tensor] = {}
    missing, copied = dict[str, int](), set[tuple[str, Block]]()
    for path in sorted(directory.glob(TENSOR_FILES)):
        file = TensorFile(path)
        for name, saved in file.tensors.items():
            if saved.block.is_whole:
                found[name], missing[name] = file.read(name), 0
            elif (name, saved.block) not in copied:
                copied.add((name, saved.block))
                whole = found.setdefault(name, torch.empty(saved.block.whole, dtype=saved.kind))
                missing[name] = missing.get(name, whole.numel()) - file.read_into(part_of(whole), name)
    if lacking := [name for name, count in missing.items() if count > 0]:
        raise ValueError(f"{directory} lacks elements of {lacking[0]}")
    return found
