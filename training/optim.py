"""Optimizers, and the learning rate as a pure function of the step. Runs on every rank."""

import math

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer

from training.config import TrainConfig


def make_optimizer(config: TrainConfig, model: nn.Module) -> Optimizer:
    """An optimizer whose weight decay leaves out biases and norms: whatever has one dimension."""
    decaying = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decaying, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, betas=(config.momentum, 0.999))
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0)


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate of the step that follows `step` steps done.

    It rises in a line over the warm-up, then falls along half a cosine to zero at the end (Loshchilov and Hutter,
    "SGDR", 2017, without restarts) or stays.
    """
    total = steps_per_epoch * config.epochs
    warmup = min(round(config.warmup_epochs * steps_per_epoch), total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Use this learning rate from now on."""
    for group in optimizer.param_groups:
        group["lr"] = value


_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Mixed precision as configured."""
    dtype = _DTYPES[config.amp]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def make_scaler(config: TrainConfig, device: torch.device) -> GradScaler:
    """What keeps float16 gradients from vanishing: it scales the loss. bfloat16 has the range not to need it."""
    return GradScaler(device.type, enabled=config.amp == "fp16")
