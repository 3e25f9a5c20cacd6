"""Mixed precision. Runs on every rank."""

import torch
from torch.amp import GradScaler

from training.config.train_config import TrainConfig

_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Mixed precision as configured; FSDP has a way of its own (training.models.fsdp)."""
    dtype = _DTYPES[config.amp] if config.strategy == "ddp" else None
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def make_scaler(config: TrainConfig, device: torch.device) -> GradScaler:
    """What keeps float16 gradients from vanishing: it scales the loss. bfloat16 has the range not to need it."""
    return GradScaler(device.type, enabled=config.amp == "fp16")
