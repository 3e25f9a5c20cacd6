"""Builds models of timm (`--model timm:NAME`), whose import takes seconds. Runs on every rank."""

import importlib
from typing import Any

from torch import nn

from hpc.base.errors import UserError, need_package
from training.config.model_names import TIMM
from training.models.factory import no_stochastic_depth


def timm_settings(model: str) -> Any:
    """Return timm's settings (PretrainedCfg) of a model `timm:NAME` or `timm:NAME.TAG`.

    Raises:
        UserError: timm is not installed, or does not have the model.
    """
    need_package("timm", "timm", f"--model {model}")
    timm = importlib.import_module("timm")
    name = model.removeprefix(TIMM)
    try:
        found = timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        raise UserError(f"--model is {model!r}, which timm does not have ({error}): use another") from error
    if found is None:
        raise UserError(f"--model is {model!r}, for which timm has no settings: use another")
    return found


def build_timm_model(model: str, classes: int, size: int, drop_path: float | None) -> nn.Module:
    """Return a model with random weights for images of `size` x `size` pixels.

    Raises:
        ValueError: the model does not take images of this size.
        UserError: `drop_path` is set, but the model has no stochastic depth.
    """
    settings, arguments = timm_settings(model), dict[str, Any]()
    native = settings.input_size[-1]
    if settings.fixed_input_size and size != native:
        arguments["img_size"] = size
    if drop_path is not None:
        arguments["drop_path_rate"] = drop_path
    timm = importlib.import_module("timm")
    try:
        made: nn.Module = timm.create_model(model.removeprefix(TIMM), num_classes=classes, **arguments)
    except TypeError as error:
        if "drop_path_rate" in str(error):
            raise no_stochastic_depth(drop_path, model) from error
        raise ValueError(f"it takes {native} pixels") from error
    return made
