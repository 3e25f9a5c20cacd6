"""Builds models by name, turns images into their inputs, and selects their precision. Runs on every rank.

The head is the model's children that hold the last layers; the other children are the backbone.

torchvision and timm are imported only for their own models: the imports take seconds on every rank.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc.base.errors import UserError, need_package
from hpc.base.text import flag
from training.config.model_names import OWN_MODELS, SMALL_CNN, TIMM
from training.config.train_config import Interpolation, TrainConfig, training_sizes
from training.runtime.counter_rng import Purpose, derive_key


def small_cnn(classes: int, channels: int, size: int) -> nn.Sequential:
    """Return a convolutional network without batch normalization, with 106,000 weights for 28 x 28 pixels.

    It has as many convolutions as are needed to reduce the image to 8 x 8 pixels. An image's result does not depend on
    the other images in the batch.
    """
    layers: list[nn.Module] = []
    width = 16
    while size > 8 or not layers:
        # Pool before the activation: the result is the same, with a quarter of the activations.
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        channels, size, width = width, size // 2, min(2 * width, 64)
    layers += [nn.Flatten(), nn.Linear(channels * size * size, 64), nn.ReLU(), nn.Linear(64, classes)]
    return nn.Sequential(*layers)


class SmallResNet(nn.Module):
    """A residual network: a convolution, three stages of 16, 32 and 64 channels, mean pooling and a linear layer.

    He, Zhang, Ren and Sun, "Deep residual learning for image recognition" (2016), section 4.2. With 20 layers it has
    270,000 weights.
    """

    def __init__(self, depth: int, classes: int, channels: int) -> None:
        super().__init__()
        stem = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        widths = [width for width in (16, 32, 64) for _ in range((depth - 2) // 6)]
        blocks = [ResidualBlock(before, width) for before, width in zip([16, *widths], widths, strict=False)]
        self.features = nn.Sequential(*stem, *blocks)
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map float [n, channels, h, w] to [n, classes]."""
        return self.fc(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut around them.

    If the shape changes, the shortcut has no weights (option A): it skips every other pixel and fills the new channels
    with zeros.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stride, self.added = width // channels, width - channels
        self.conv1 = nn.Conv2d(channels, width, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> Tensor:
        """Map [n, channels, h, w] to [n, width, h / stride, w / stride], rounded up."""
        values = functional.relu(self.bn1(self.conv1(images)))
        shortcut = images[:, :, :: self.stride, :: self.stride]
        if self.added:
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        return functional.relu(self.bn2(self.conv2(values)) + shortcut)


_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Errors that models raise for images of a size that they do not take.
_SIZE_ERRORS = (RuntimeError, ValueError, AssertionError)


def input_size(config: TrainConfig, native: int | None) -> int:
    """Return the side of the model's square inputs in pixels. `native` is the side of images in memory, else None."""
    if config.image_size is not None:
        return config.image_size
    if config.model in OWN_MODELS:
        return native or (64 if config.model == SMALL_CNN else 32)
    if config.model.startswith(TIMM):
        return int(timm_settings(config.model).input_size[-1])
    return 299 if config.model == "inception_v3" else 224


def build_model(config: TrainConfig, *, classes: int, channels: int, size: int) -> nn.Module:
    """Return a model with random weights from the seed, and a frozen backbone if the flags ask for it.

    Raises UserError if the model does not take images of this size, or a flag does not fit the model.
    """
    torch.manual_seed(derive_key(config.seed, Purpose.WEIGHTS))
    try:
        model = _construct(config, classes, channels, size)
        if config.image_size is not None:
            _try_forward(model, channels, size)
    except _SIZE_ERRORS as error:
        raise UserError(
            f"--image-size is {size}, which {config.model} does not take ({first_line(error)}): use another"
        ) from error
    _check_other_sizes(model, config, channels, size)
    if config.head_hidden:
        add_hidden_layer(model, config.head_hidden)
    if config.freeze_backbone:
        model.requires_grad_(requires_grad=False)
        for name in head_names(model):
            model.get_submodule(name).requires_grad_(requires_grad=True)
    if config.weights and hasattr(model, "transform_input"):
        # torchvision's pretrained GoogLeNet and Inception need another normalization: make them convert to it.
        vars(model)["transform_input"] = True
    return model.to(memory_format=torch.channels_last)


def _construct(config: TrainConfig, classes: int, channels: int, size: int) -> nn.Module:
    name = config.model
    if name.startswith(TIMM):
        return _construct_timm(name, classes, size)
    if name == SMALL_CNN:
        return small_cnn(classes, channels, size)
    if name in OWN_MODELS:
        return SmallResNet(int(name.removeprefix("resnet")), classes, channels)
    from torchvision import models  # noqa: PLC0415  # takes two seconds

    arguments: dict[str, Any] = {}
    if name in {"googlenet", "inception_v3"}:
        # Auxiliary classifiers change the type of outputs, and are not needed with batch normalization.
        arguments = {"aux_logits": False, "init_weights": True}
    elif name == "maxvit_t":
        arguments = {"input_size": (size, size)}
    elif name.startswith("vit_"):
        arguments = {"image_size": size}
    make = cast("Callable[..., nn.Module]", models.get_model)
    return make(name, weights=None, num_classes=classes, **arguments)


def timm_settings(model: str) -> Any:
    """Return timm's settings (PretrainedCfg) of `timm:NAME` or `timm:NAME.TAG`. Raises UserError if there are none."""
    need_package("timm", "timm", f"--model {model}")
    timm = importlib.import_module("timm")
    try:
        return timm.get_pretrained_cfg(model.removeprefix(TIMM), allow_unregistered=False)
    except RuntimeError as error:
        raise UserError(f"--model is {model!r}, which timm does not have ({error}): use another") from error


def _construct_timm(model: str, classes: int, size: int) -> nn.Module:
    settings = timm_settings(model)
    native = settings.input_size[-1]
    sizes = {"img_size": size} if settings.fixed_input_size and size != native else {}
    timm = importlib.import_module("timm")
    try:
        return timm.create_model(model.removeprefix(TIMM), num_classes=classes, **sizes)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ValueError(f"it takes {native} pixels") from error


def _check_other_sizes(model: nn.Module, config: TrainConfig, channels: int, size: int) -> None:
    """Raise UserError if a model for images of `size` does not take those of earlier epochs or of evaluations."""
    if config.initial_image_size is not None and config.initial_image_size >= size:
        raise UserError(
            f"--initial-image-size is {config.initial_image_size}, but --image-size is {size}: use a smaller one, or "
            "leave it out"
        )
    others = {
        "initial_image_size": training_sizes(config, size),
        "eval_image_size": [config.eval_image_size or size],
    }
    for name, sides in others.items():
        for side in sorted({*sides} - {size}):
            try:
                _try_forward(model, channels, side)
            except _SIZE_ERRORS as error:
                images = "" if side == getattr(config, name) else f" and gives images of {side} pixels"
                raise UserError(
                    f"{flag(name)} is {getattr(config, name)}{images}, which {config.model} for {size} pixels does not "
                    f"take ({first_line(error)}): leave it out"
                ) from error


@torch.no_grad()
def _try_forward(model: nn.Module, channels: int, size: int) -> None:
    """Run the model on one image. Raises one of _SIZE_ERRORS if a layer does not take this size."""
    model.eval()(torch.zeros(1, channels, size, size))


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [repr(error)])[0]


def last_layer_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers whose outputs are the classes. Distilled models have several, and average them."""
    # The settings of timm's models name these layers.
    named = getattr(model, "pretrained_cfg", {}).get("classifier")
    if named:
        parts = {name: model.get_submodule(name) for name in ([named] if isinstance(named, str) else named)}
        return tuple(
            f"{name}.{len(part) - 1}" if isinstance(part, nn.Sequential) else name for name, part in parts.items()
        )
    # SqueezeNet ends with a convolution.
    kinds = (nn.Linear, nn.Conv2d)
    layers = [[name for name, module in model.named_modules() if isinstance(module, kind)] for kind in kinds]
    return ((layers[0] or layers[1])[-1],)


def head_names(model: nn.Module) -> set[str]:
    """Return the names of the model's children that hold the last layers, such as `fc` or `classifier`."""
    return {name.partition(".")[0] for name in last_layer_names(model)}


def add_hidden_layer(model: nn.Module, width: int) -> None:
    """Insert a hidden layer before each last layer. Raises UserError if a last layer is a convolution."""
    for name in last_layer_names(model):
        last = model.get_submodule(name)
        if not isinstance(last, nn.Linear):
            kind = type(last).__name__
            raise UserError(f"--head-hidden is {width}, but the last layer of this model is a {kind}: use 0")
        first, second = nn.Linear(last.in_features, width), nn.Linear(width, last.out_features)
        model.set_submodule(name, nn.Sequential(first, nn.ReLU(), second))


def set_train_mode(model: nn.Module) -> None:
    """Call `model.train()`, but not for frozen children, whose batch statistics must not change."""
    model.train()
    for part in model.children():
        parameters = list(part.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            part.eval()


def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a value for each channel, such as its mean, as a tensor that images can be divided by."""
    return torch.tensor(values, device=device)[:, None, None]


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Turns images (bytes) into the model's inputs (floats), on the model's device."""

    mean: Tensor
    """Mean of each channel, float [c, 1, 1], for pixel values from 0 to 1."""
    std: Tensor
    channels: int
    size: int
    interpolation: Interpolation = "bilinear"

    def __call__(self, images: Tensor) -> Tensor:
        """Turn uint8 [n, c, h, w] into float [n, channels, size, size]. A single channel is repeated."""
        values = images.to(self.mean.device, non_blocking=True).float()
        self._normalize(values)
        if values.shape[2:] != (self.size, self.size):
            values = functional.interpolate(values, (self.size, self.size), mode=self.interpolation, antialias=True)
        values = values.expand(-1, self.channels, -1, -1)
        values = values.contiguous(memory_format=torch.channels_last)
        if self.channels == 1:
            # Images of one channel have both memory formats at once, so torch does not change their strides. On a GPU,
            # the gradient of the first weights then has other strides than DDP's buckets: DDP warns, and copies it.
            values = values.as_strided(values.shape, (self.size**2, 1, self.size, 1))
        return values

    def _normalize(self, values: Tensor) -> None:
        """Normalize pixel values from 0 to 255 in place: new memory would take longer than the arithmetic."""
        mean, std = self.mean, self.std
        count, channels, height, width = values.shape
        if values.is_contiguous(memory_format=torch.channels_last):
            # A row of pixels is one vector for the CPU; with a vector per pixel, it takes 3 times as long.
            values = values.permute(0, 2, 3, 1).view(count, height, width * channels)
            mean, std = (statistic.flatten().repeat(width) for statistic in (mean, std))
        values.div_(255).sub_(mean).div_(std)


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the context of `--amp`. It does nothing with FSDP, which has its own mixed precision."""
    dtype = _DTYPES[config.amp] if config.strategy == "ddp" else None
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
