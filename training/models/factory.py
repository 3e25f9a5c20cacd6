"""Models by name, and what stands between the data and a model. Runs on every rank.

torchvision is imported only for its own models: the import takes every rank two seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc.core.errors import UserError
from training.config.model_names import OWN_MODELS, SMALL_CNN
from training.config.train_config import TrainConfig
from training.models.head import add_hidden_layer, freeze_backbone
from training.models.resnet import SmallResNet
from training.runtime.counter_rng import Purpose, derive_key

_FOLDER_SIZE, _SMALL_CNN_FOLDER_SIZE = 32, 64
_TORCHVISION_SIZE = 224
_SIZES = {"inception_v3": 299}
FORMATS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}

# What a torchvision model must be told to be a plain classifier of images of a given size.
_EXTRAS: dict[str, Callable[[int], dict[str, Any]]] = {
    # The auxiliary classifiers are for trainings without normalisation or residuals, and change what forward returns.
    "googlenet": lambda _: {"aux_logits": False, "init_weights": True},
    "inception_v3": lambda _: {"aux_logits": False, "init_weights": True},
    "maxvit_t": lambda size: {"input_size": (size, size)},
    "vit_b_16": lambda size: {"image_size": size},
    "vit_b_32": lambda size: {"image_size": size},
    "vit_h_14": lambda size: {"image_size": size},
    "vit_l_16": lambda size: {"image_size": size},
    "vit_l_32": lambda size: {"image_size": size},
}


def input_size(config: TrainConfig, native: int | None) -> int:
    """Side in pixels of the square images that the model sees; `native` is the side of images in memory."""
    if config.image_size is not None:
        return config.image_size
    if config.model in OWN_MODELS:
        return native or (_SMALL_CNN_FOLDER_SIZE if config.model == SMALL_CNN else _FOLDER_SIZE)
    return _SIZES.get(config.model, _TORCHVISION_SIZE)


def input_channels(config: TrainConfig, native: int) -> int:
    """Channels that the model sees: torchvision's models see three."""
    return native if config.model in OWN_MODELS else 3


def build_model(config: TrainConfig, *, classes: int, channels: int, size: int) -> nn.Module:
    """A model with new weights, which follow from the seed. What is frozen of it needs no gradients.

    Raises:
        UserError: the model cannot take images of this size.
    """
    torch.manual_seed(derive_key(config.seed, Purpose.WEIGHTS))
    try:
        model = _construct(config.model, classes, channels, size)
        if config.image_size is not None:
            _try(model, channels, size)
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"--image-size is {size}, which {config.model} cannot take ({reason}): use another") from error
    _try_in_evaluation(config, model, channels, size)
    if config.head_hidden:
        add_hidden_layer(model, config.head_hidden)
    if config.freeze_backbone:
        freeze_backbone(model)
    if config.weights and hasattr(model, "transform_input"):
        # torchvision's pretrained GoogLeNet and Inception were trained on another normalisation, and undo the usual.
        vars(model)["transform_input"] = True
    return model.to(memory_format=FORMATS[config.memory_format])


def _construct(name: str, classes: int, channels: int, size: int) -> nn.Module:
    if name == SMALL_CNN:
        return small_cnn(classes, channels, size)
    if name in OWN_MODELS:
        return SmallResNet(int(name.removeprefix("resnet")), classes, channels)
    from torchvision import models  # noqa: PLC0415  # takes two seconds: only who needs it waits

    extras = _EXTRAS[name](size) if name in _EXTRAS else {}
    make = cast("Callable[..., nn.Module]", models.get_model)
    return make(name, weights=None, num_classes=classes, **extras)


@torch.no_grad()
def _try(model: nn.Module, channels: int, size: int) -> None:
    """See whether an image is large enough for all the layers."""
    model.eval()(torch.zeros(1, channels, size, size))


def _try_in_evaluation(config: TrainConfig, model: nn.Module, channels: int, size: int) -> None:
    """See whether the model takes images of another size than it was made for."""
    if config.eval_image_size in {None, size}:
        return
    try:
        _try(model, channels, config.eval_image_size or size)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(
            f"--eval-image-size is {config.eval_image_size}, and {config.model} for {size} pixels does not take that "
            f"({str(error).partition(chr(10))[0]}): leave it out"
        ) from error


def small_cnn(classes: int, channels: int, size: int) -> nn.Sequential:
    """A convolutional network for small images: 106,000 weights for 28 x 28 pixels, and no state but them.

    It has as many convolutions as it takes to come down to 8 x 8 pixels, and no normalisation across the batch, so
    what it computes does not depend on how a batch is shared.
    """
    layers: list[nn.Module] = []
    width = 16
    while size > 8 or not layers:
        # Pooling before the activation gives the same and activates a quarter.
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        channels, size, width = width, size // 2, min(2 * width, 64)
    layers += [nn.Flatten(), nn.Linear(channels * size * size, 64), nn.ReLU(), nn.Linear(64, classes)]
    return nn.Sequential(*layers)


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
        """The one for images with these statistics in each channel (of values from 0 to 1)."""
        scale = torch.tensor(std, device=device)[:, None, None]
        return cls(mean=torch.tensor(mean, device=device)[:, None, None], std=scale, channels=channels, size=size)

    def __call__(self, images: Tensor) -> Tensor:
        """Make float [n, channels, size, size] of uint8 [n, c, h, w]; one channel is repeated as needed."""
        values = (images.to(self.mean.device, non_blocking=True).float() / 255 - self.mean) / self.std
        if values.shape[2:] != (self.size, self.size):
            values = functional.interpolate(values, (self.size, self.size), mode="bilinear", antialias=True)
        values = values.expand(-1, self.channels, -1, -1)
        return values.contiguous(memory_format=self.memory_format)
