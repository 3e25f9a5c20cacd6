"""Counter-based random numbers: each is a function of the seed, its purpose and an index, so there is no state to save.

Runs on every rank and in its loader workers. The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), which computes its i-th number directly, and many at once.
"""

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Purpose(IntEnum):
    """The purposes of random numbers; each has its own streams. Changing a value changes the runs of a seed."""

    WEIGHTS = 1
    HOLD_OUT = 2
    ORDER = 3
    AUGMENTATION = 4
    STEP = 5
    MIX = 6
    CUT = 7
    ERASE = 8


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def derive_key(seed: int, purpose: Purpose, *counters: int) -> int:
    """Derive the key of a stream, such as the sample order of epoch 3."""
    key = seed & _MASK
    for counter in (purpose, *counters):
        key = _mix((_mix((key + _GAMMA) & _MASK) + counter) & _MASK)
    return key


def _signed(value: int) -> int:
    """Convert an unsigned number of 64 bits to the int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value


def _shifted(value: Tensor, places: int) -> Tensor:
    """Shift right logically: torch's own shift repeats the sign."""
    return (value >> places) & ((1 << (64 - places)) - 1)


def bits(key: int, index: Tensor) -> Tensor:
    """Return 64 random bits for each index (int64, any shape) into the stream."""
    value = (index + 1) * _signed(_GAMMA) + _signed(key)
    value = (value ^ _shifted(value, 30)) * _signed(_FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(_SECOND)
    return value ^ _shifted(value, 31)


def rand_float(key: int, index: int) -> float:
    """Return the float64 from [0, 1) at one index of the stream, without the overhead of tensors."""
    return (_mix((key + (index + 1) * _GAMMA) & _MASK) >> 11) / 2**53


def uniform(key: int, index: Tensor) -> Tensor:
    """Return a float32 from [0, 1) for each index."""
    return _shifted(bits(key, index), 40).float() / 2**24


def rand_int(key: int, index: Tensor, bound: int) -> Tensor:
    """Return an integer from 0 to bound - 1 (bound up to 2**31) for each index."""
    return (_shifted(bits(key, index), 33) * bound) >> 31


def permutation(key: int, size: int) -> Tensor:
    """Return the integers 0 to size - 1, sorted by their random bits, no two of which are equal."""
    return torch.argsort(bits(key, torch.arange(size)))
