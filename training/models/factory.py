"""Builds a model by its name; turns images into its inputs; selects its precision. Runs on every rank.

torchvision is imported only for its own models: the import takes every rank two seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional

from hpc.core.errors import UserError
from training.config.model_names import OWN_MODELS, SMALL_CNN
from training.config.train_config import TrainConfig
from training.models.head import add_hidden_layer, freeze_backbone
from training.models.small_models import SmallResNet, small_cnn
from training.runtime.counter_rng import Purpose, derive_key

_FOLDER_SIZE, _SMALL_CNN_FOLDER_SIZE = 32, 64
_TORCHVISION_SIZE = 224
_SIZES = {"inception_v3": 299}
FORMATS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}

_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# What models raise for images of a size that they do not take.
_SIZE_ERRORS = (RuntimeError, ValueError, AssertionError)


def input_size(config: TrainConfig, native: int | None) -> int:
    """Side in pixels of the model's square inputs; `native` is the side of images in memory."""
    if config.image_size is not None:
        return config.image_size
    if config.model in OWN_MODELS:
        return native or (_SMALL_CNN_FOLDER_SIZE if config.model == SMALL_CNN else _FOLDER_SIZE)
    return _SIZES.get(config.model, _TORCHVISION_SIZE)


def input_channels(config: TrainConfig, native: int) -> int:
    """Channels of the model's inputs: three for torchvision's models."""
    return native if config.model in OWN_MODELS else 3


def build_model(config: TrainConfig, *, classes: int, channels: int, size: int) -> nn.Module:
    """A model with random weights, which follow from the seed; with a frozen backbone if the flags ask for it.

    Raises:
        UserError: the model does not take images of this size.
    """
    torch.manual_seed(derive_key(config.seed, Purpose.WEIGHTS))
    try:
        model = _construct(config.model, classes, channels, size)
        if config.image_size is not None:
            _try_forward(model, channels, size)
    except _SIZE_ERRORS as error:
        raise UserError(
            f"--image-size is {size}, which {config.model} does not take ({_first_line(error)}): use another"
        ) from error
    if config.eval_image_size not in {None, size}:
        try:
            _try_forward(model, channels, config.eval_image_size or size)
        except _SIZE_ERRORS as error:
            raise UserError(
                f"--eval-image-size is {config.eval_image_size}, which {config.model} for {size} pixels does not take "
                f"({_first_line(error)}): leave it out"
            ) from error
    if config.head_hidden:
        add_hidden_layer(model, config.head_hidden)
    if config.freeze_backbone:
        freeze_backbone(model)
    if config.weights and hasattr(model, "transform_input"):
        # torchvision's pretrained GoogLeNet and Inception were trained with another normalisation, and convert to it.
        vars(model)["transform_input"] = True
    return model.to(memory_format=FORMATS[config.memory_format])


def _construct(name: str, classes: int, channels: int, size: int) -> nn.Module:
    if name == SMALL_CNN:
        return small_cnn(classes, channels, size)
    if name in OWN_MODELS:
        return SmallResNet(int(name.removeprefix("resnet")), classes, channels)
    from torchvision import models  # noqa: PLC0415  # takes two seconds

    make = cast("Callable[..., nn.Module]", models.get_model)
    return make(name, weights=None, num_classes=classes, **_arguments(name, size))


def _arguments(name: str, size: int) -> dict[str, Any]:
    """Arguments that make a torchvision model a plain classifier of images of this size."""
    if name in {"googlenet", "inception_v3"}:
        # Auxiliary classifiers change what forward returns; with normalisation they are not needed.
        return {"aux_logits": False, "init_weights": True}
    if name == "maxvit_t":
        return {"input_size": (size, size)}
    return {"image_size": size} if name.startswith("vit_") else {}


@torch.no_grad()
def _try_forward(model: nn.Module, channels: int, size: int) -> None:
    """Run the model on one image; raises one of _SIZE_ERRORS if a layer does not take its size."""
    model.eval()(torch.zeros(1, channels, size, size))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Turns the data's bytes into the model's floats, on the model's device."""

    mean: Tensor
    std: Tensor
    channels: int
    size: int
    memory_format: torch.memory_format = torch.channels_last

    @classmethod
    def make(
        cls, mean: tuple[float, ...], std: tuple[float, ...], channels: int, size: int, device: torch.device
    ) -> "Preprocess":
        """For images with these statistics of each channel (of values from 0 to 1)."""
        scale = torch.tensor(std, device=device)[:, None, None]
        return cls(mean=torch.tensor(mean, device=device)[:, None, None], std=scale, channels=channels, size=size)

    def __call__(self, images: Tensor) -> Tensor:
        """Uint8 [n, c, h, w] to float [n, channels, size, size]; a single channel is repeated."""
        values = (images.to(self.mean.device, non_blocking=True).float() / 255 - self.mean) / self.std
        if values.shape[2:] != (self.size, self.size):
            values = functional.interpolate(values, (self.size, self.size), mode="bilinear", antialias=True)
        values = values.expand(-1, self.channels, -1, -1)
        return values.contiguous(memory_format=self.memory_format)


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """The context of `--amp`; FSDP has mixed precision of its own (training.models.fsdp)."""
    dtype = _DTYPES[config.amp] if config.strategy == "ddp" else None
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def make_scaler(config: TrainConfig, device: torch.device) -> GradScaler:
    """Scales the loss so that float16 gradients do not vanish; for the other types it does nothing."""
    return GradScaler(device.type, enabled=config.amp == "fp16")
