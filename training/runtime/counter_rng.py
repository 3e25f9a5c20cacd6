"""Computes random numbers from the seed, a purpose and an index, so that no generator's state needs saving.

Runs on every rank and in its loader workers. The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), which computes its i-th number without the earlier ones.
"""

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Purpose(IntEnum):
    """The purposes of random numbers; each has its own streams. Changing a value changes the results of a seed."""

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
    """Return the key of a stream of random numbers, such as for the sample order of epoch 3."""
    key = seed & _MASK
    for counter in (purpose, *counters):
        key = _mix((_mix((key + _GAMMA) & _MASK) + counter) & _MASK)
    return key


def _signed(value: int) -> int:
    """Convert an unsigned 64-bit number to the int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value


def _shifted(value: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros: torch's own shift repeats the sign bit."""
    return (value >> places) & ((1 << (64 - places)) - 1)


def bits(key: int, index: Tensor) -> Tensor:
    """Return 64 random bits for each index (int64, any shape) of the stream `key`."""
    value = (index + 1) * _signed(_GAMMA) + _signed(key)
    value = (value ^ _shifted(value, 30)) * _signed(_FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(_SECOND)
    return value ^ _shifted(value, 31)


def rand_float(key: int, index: int) -> float:
    """Return the float64 in [0, 1) at one index of the stream `key`, without the overhead of tensors."""
    return (_mix((key + (index + 1) * _GAMMA) & _MASK) >> 11) / 2**53


def uniform(key: int, index: Tensor) -> Tensor:
    """Return a float32 in [0, 1) for each index of the stream `key`."""
    return _shifted(bits(key, index), 40).float() / 2**24


def rand_int(key: int, index: Tensor, bound: int) -> Tensor:
    """Return an integer from 0 to bound - 1 for each index of the stream `key`; `bound` is at most 2**31."""
    return (_shifted(bits(key, index), 33) * bound) >> 31


def permutation(key: int, size: int) -> Tensor:
    """Return the integers from 0 to size - 1 in the random order of the stream `key`."""
    return torch.argsort(bits(key, torch.arange(size)))
