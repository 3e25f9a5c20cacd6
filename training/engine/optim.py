"""Makes the optimizer, and computes the learning rate of each step. Runs on every rank."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from training.config.rules import parse_step_epochs
from training.config.train_config import TrainConfig, highest_learning_rate
from training.models.blocks import depths
from training.runtime.train_progress import Progress

Groups = list[dict[str, Any]]

_BETA2 = 0.999  # torch's default, of Adam and AdamW
# Name of the MLP with which SwinV2 computes the position biases of its attention.
_POSITION_MLP = "cpb_mlp"


def make_sgd(groups: Groups, config: TrainConfig, settings: dict[str, Any]) -> Optimizer:
    """Make SGD for groups of parameters, with `settings` of all optimizers."""
    # torch refuses Nesterov momentum without momentum.
    nesterov = config.nesterov and config.momentum > 0
    optimizer = SGD(groups, momentum=config.momentum, nesterov=nesterov, **settings)
    if settings.get("fused") and config.momentum:
        # torch allocates the momentum in the first step without clearing it. If GradScaler lets the kernel skip that
        # step (fp16), the momentum would be what the memory held before.
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def make_optimizer(config: TrainConfig, model: nn.Module) -> Optimizer:
    """Make the optimizer of the parameters that require gradients. On CUDA it is fused if possible (fewer kernels).

    Norms and biases always have groups of their own, so `hpc fork` may change --decay-norm-and-bias. A group's
    learning rate is multiplied by its `lr_scale`, which is 1 for the first group.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed, scales = decayed_names(model), layer_scales(model, config.layer_decay)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        groups.setdefault((scales[name], name in decayed), []).append(parameter)
    decays = {True: config.weight_decay, False: config.weight_decay if config.decay_norm_and_bias else 0.0}
    ordered: Groups = [
        {"params": groups[scale, decay], "weight_decay": decays[decay], "lr_scale": scale}
        for scale, decay in sorted(groups, reverse=True)
    ]
    settings: dict[str, Any] = {"lr": highest_learning_rate(config)}
    # torch 2.15 cannot shard the fused SGD, only Adam and AdamW.
    fusible = config.optimizer != "sgd" or config.strategy == "ddp"
    if fusible and all(parameter.device.type == "cuda" for parameter in trained.values()):
        settings["fused"] = True
    if config.optimizer == "sgd":
        return make_sgd(ordered, config, settings)
    kind = AdamW if config.optimizer == "adamw" else Adam
    return kind(ordered, betas=(config.momentum, _BETA2), **settings)


def decayed_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that always have decay: weights of linear layers, convolutions and attention.

    So have the matrices of recurrent layers, such as `weight_ih_l0`. Biases, norms, embeddings, tokens, scales and
    position biases have decay only with --decay-norm-and-bias.
    """
    spared = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    # timm models list further exclusions in `no_weight_decay()`.
    spared |= set(getattr(model, "no_weight_decay", tuple)())
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1
        and "weight" in name.rpartition(".")[2]
        and name not in spared
        and _POSITION_MLP not in name
    }


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor of each parameter's learning rate, by name: `decay` ** (number of blocks after its own).

    See Clark et al., "ELECTRA" (2020), and, for vision transformers, Bao et al., "BEiT" (2021): embeddings and head
    count as blocks.
    """
    depth_of = depths(model)
    deepest = max(depth_of.values())
    return {name: decay ** (deepest - depth) for name, depth in depth_of.items()}


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, scaled by each group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


# --- schedules ---

# torch's ReduceLROnPlateau counts a loss that is lower by this share as an improvement.
_THRESHOLD = 1e-4


def learning_rate(config: TrainConfig, steps_per_epoch: int, progress: Progress) -> float:
    """Return the next step's learning rate, after a linear warm-up: a pure function of the flags and the progress."""
    unlowered = highest_learning_rate(config)
    highest = unlowered * progress.lr_factor
    step, total_steps = progress.step, steps_per_epoch * config.epochs
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), total_steps)
    if step < warmup_steps:
        return highest * (step + 1) / warmup_steps
    match config.lr_scheduler:
        case "cosine":  # Loshchilov and Hutter, "SGDR" (2017), without restarts
            done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            lowest_share = config.min_lr / unlowered
            return highest * (lowest_share + (1.0 - lowest_share) * 0.5 * (1 + math.cos(math.pi * done)))
        case "step":
            epoch, step_epochs = step // steps_per_epoch, parse_step_epochs(config.lr_step_epochs)
            drops = sum(epoch >= drop for drop in step_epochs) if len(step_epochs) > 1 else epoch // step_epochs[0]
            return highest * config.lr_gamma**drops
        case "plateau" | "constant":  # `follow_plateau` lowers the learning rate through Progress.lr_factor
            return highest


def follow_plateau(config: TrainConfig, progress: Progress, val_loss: float) -> None:
    """Lower the rate of the plateau schedule if `val_loss` stops improving, like torch's ReduceLROnPlateau.

    As in timm, losses of the warm-up do not count.
    """
    if config.lr_scheduler != "plateau" or 0 < progress.epoch <= config.warmup_epochs:
        return
    # A loss that is not a number is never the lowest.
    lowest = math.inf if progress.plateau_loss is None else progress.plateau_loss
    if val_loss < lowest * (1 - _THRESHOLD):
        progress.plateau_loss, progress.plateau_epochs = val_loss, 0
    else:
        progress.plateau_epochs += 1
    if progress.plateau_epochs > config.plateau_patience:
        progress.lr_factor *= config.lr_gamma
        progress.plateau_epochs = 0
