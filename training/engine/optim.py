"""Optimizers by name, and mixed precision. Runs on every rank."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from training.config.train_config import TrainConfig

Groups = list[dict[str, Any]]


def _sgd(groups: Groups, config: TrainConfig) -> Optimizer:
    # torch refuses Nesterov momentum without momentum.
    nesterov = config.nesterov and config.momentum > 0
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov)


# By the names of `training.config.train_config.Optimizer`.
MAKERS: dict[str, Callable[[Groups, TrainConfig], Optimizer]] = {
    "sgd": _sgd,
    "adamw": lambda groups, config: AdamW(groups, lr=config.lr, betas=(config.momentum, 0.999)),
    "adam": lambda groups, config: Adam(groups, lr=config.lr, betas=(config.momentum, 0.999)),
}


def make_optimizer(config: TrainConfig, model: nn.Module) -> Optimizer:
    """An optimizer of what is to be trained. Biases and norms, whatever has one dimension, decay only if they should.

    They are a group of their own in any case: so the flag may change in the course of a run.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of_others = config.weight_decay if config.decay_norm_and_bias else 0.0
    groups: Groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": of_others},
    ]
    return MAKERS[config.optimizer]([group for group in groups if group["params"]], config)


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Use this learning rate from now on."""
    for group in optimizer.param_groups:
        group["lr"] = value


def current_learning_rate(optimizer: Optimizer) -> float:
    """The learning rate of the last step."""
    return float(optimizer.param_groups[0]["lr"])
