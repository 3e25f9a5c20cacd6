"""What a model is, how images are made ready for it, and what it was made from: `model.json` beside its weights.

Enough to build the model again, or to use an exported one, without the run directory. Written by rank 0; read wherever
a model is exported or used.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from hpc.core.errors import UserError
from training.config.train_config import TrainConfig
from training.data.dataset import Data
from training.data.transforms.crop import EVALUATION_CROP
from training.models.factory import Preprocess

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """One model."""

    model: str
    """The name of its architecture."""
    head_hidden: int
    transform_input: bool
    """Whether it undoes the usual normalisation, as torchvision's pretrained GoogLeNet and Inception do."""
    classes: tuple[str, ...]
    """Their names, in the order of the model's outputs."""
    crop_pct: float
    """Side of the square in the middle of an image that the model looks at, as a part of the image's shorter side."""
    pixels: tuple[int, int, int]
    """Channels, height and width that the square is scaled to, as bytes: what the data set has, or decoding makes."""
    channels: int
    """Channels that the model sees: one is repeated as needed."""
    size: int
    """Side that the model sees: the normalised values are scaled to it if `pixels` are of another."""
    mean: tuple[float, ...]
    """Of each channel, of values from 0 to 1."""
    std: tuple[float, ...]
    amp: Literal["none", "bf16", "fp16"]
    """The precision in which the model was tested."""
    made_from: Mapping[str, Any]
    """The flags, the data, the versions: `training.evaluation.provenance`."""

    def to_json(self) -> str:
        """The content of `model.json`."""
        return json.dumps({"format": FORMAT, **asdict(self), "preprocessing": self.preprocessing}, indent=2) + "\n"

    @property
    def preprocessing(self) -> list[str]:
        """What is done with an image, for people who have to do it again elsewhere."""
        channels, height, width = self.pixels
        side = self.size
        scaled = [f"scale to {side} x {side} pixels (bilinear, antialiased)"] if (height, width) != (side, side) else []
        return [
            f"decode to {'RGB' if channels == 3 else 'gray'} of 8 bits, without EXIF rotation",
            f"cut out the square in the middle whose side is {self.crop_pct:g} of the shorter side",
            f"scale that to {height} x {width} pixels (bilinear, antialiased)",
            "divide by 255, subtract the mean and divide by the standard deviation of each channel",
            *scaled,
            *([f"repeat the channel {self.channels} times"] if self.channels != channels else []),
        ]

    def config(self) -> TrainConfig:
        """The flags that the model is built with."""
        weights = "./was-pretrained" if self.transform_input else None
        return TrainConfig(data=".", model=self.model, head_hidden=self.head_hidden, weights=weights, amp=self.amp)


def make_card(config: TrainConfig, data: Data, preprocess: Preprocess, made_from: Mapping[str, Any]) -> ModelCard:
    """The card of a model of this training; `preprocess` is that of its evaluations."""
    shape = data.shape if data.in_memory else (preprocess.size, preprocess.size)
    return ModelCard(
        model=config.model,
        head_hidden=config.head_hidden,
        transform_input=config.weights is not None and config.model in {"googlenet", "inception_v3"},
        classes=data.classes,
        crop_pct=1.0 if data.in_memory else EVALUATION_CROP,
        pixels=(data.channels, *shape),
        channels=preprocess.channels,
        size=preprocess.size,
        mean=data.mean,
        std=data.std,
        amp=config.amp,
        made_from=made_from,
    )


def read_card(text: str, source: str) -> ModelCard:
    """The card in the content of `model.json`.

    Args:
        text: the content.
        source: where it is from, for messages.

    Raises:
        UserError: it is damaged, or of another version.
    """
    try:
        found = json.loads(text)
        values = {field.name: found[field.name] for field in fields(ModelCard)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return ModelCard(**(values | lists))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{source} is damaged or of another version ({error!r}): export or train again") from error
