"""Passes the device chosen at the submission to the ranks, in their environment. Runs anywhere; needs no torch."""

from collections.abc import Mapping
from typing import Literal

from hpc.base.environment import DEVICE

DeviceChoice = Literal["auto", "cuda", "cpu"]
"""Device of the ranks. `auto` means GPUs if torch can use any, else CPUs."""
# An empty CUDA_VISIBLE_DEVICES hides all GPUs from torch.
RANK_VARIABLES: Mapping[DeviceChoice, Mapping[str, str]] = {
    "auto": {}, "cuda": {DEVICE: "cuda"}, "cpu": {DEVICE: "cpu", "CUDA_VISIBLE_DEVICES": ""},
}  # fmt: skip
"""Environment variables of the ranks for each device."""
