"""Tells which part of a tensor a rank holds, and copies the common part of two of them. Runs on every rank."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

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

    @property
    def as_whole(self) -> "Block":
        """The whole tensor of which this is a block."""
        return Block(offset=(0,) * len(self.whole), shape=self.whole, whole=self.whole)

    def common_size(self, other: "Block") -> int:
        """Return the number of elements that two blocks of a tensor share."""
        common = self.common(other)
        return math.prod(last - first for first, last in zip(*common, strict=True)) if common else 0

    def common(self, other: "Block") -> tuple[Numbers, Numbers] | None:
        """Return where the part that two blocks of a tensor share begins and ends; None if they share nothing."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = [[at + size for at, size in zip(each.offset, each.shape, strict=True)] for each in (self, other)]
        end = tuple(map(min, *ends))
        return None if any(first >= last for first, last in zip(begin, end, strict=True)) else (begin, end)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank holds of a tensor of the state."""

    tensor: "Tensor"
    """On the rank's device; its shape is the block's."""
    block: Block


def is_sharded(value: Any) -> bool:
    """Return whether a tensor is distributed over ranks: a DTensor. All ranks agree."""
    return hasattr(value, "to_local")


def part_of(value: Any) -> Part:
    """Return what this rank holds of a tensor, which may be sharded (DTensor).

    Raises:
        ValueError: the tensor is sharded in a way that is not supported.
    """
    if not is_sharded(value):
        shape = tuple(value.shape)
        return Part(tensor=value.detach(), block=Block(offset=(0,) * len(shape), shape=shape, whole=shape))
    if any(placement.is_partial() for placement in value.placements):
        raise ValueError("it is a DTensor with sums that are not reduced yet (Partial)")
    local = value.to_local().detach()
    [chunk, *_] = value.__create_chunk_list__()  # what torch's distributed checkpoints use; read in torch 2.6 to 2.15
    block = Block(offset=tuple(chunk.offsets), shape=tuple(local.shape), whole=tuple(value.shape))
    return Part(tensor=local, block=block)


def copy_common(target: Part, source: "Tensor", block: Block) -> int:
    """Copy to a part what a block of the same tensor, with the content `source`, has of it. Returns the elements."""
    common = target.block.common(block)
    if common is None:
        return 0
    begin, end = common

    def cut(tensor: "Tensor", offset: Numbers) -> "Tensor":
        return tensor[tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offset, strict=True))]

    into = cut(target.tensor, target.block.offset)
    into.copy_(cut(source, block.offset))
    return into.numel()
