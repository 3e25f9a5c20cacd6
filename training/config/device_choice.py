"""What ranks compute on: chosen at the submission, told to them in their environment. Runs everywhere; no torch."""

from collections.abc import Mapping
from typing import Literal

from hpc.base.environment import DEVICE

DeviceChoice = Literal["auto", "cuda", "cpu"]
"""`auto`: GPUs if torch can use some, else CPUs."""
# torch sees no GPU if none is visible.
RANK_VARIABLES: Mapping[DeviceChoice, Mapping[str, str]] = {
    "auto": {}, "cuda": {DEVICE: "cuda"}, "cpu": {DEVICE: "cpu", "CUDA_VISIBLE_DEVICES": ""},
}  # fmt: skip
"""The environment variables of the ranks."""


def must_use_gpu(environment: Mapping[str, str]) -> bool:
    """Whether a rank without a GPU has to end instead of using the CPU."""
    return environment.get(DEVICE) == "cuda"
