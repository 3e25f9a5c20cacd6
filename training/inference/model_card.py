"""Owns `model.json`, which says how to build a model, how to prepare images for it, and how it was made.

With this file, nobody needs the run directory to rebuild a model or to use an exported one. Rank 0 writes it; `hpc
export` and `hpc predict` read it anywhere.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from hpc.base.errors import UserError
from training.config.rules import parse_crop_pct
from training.config.train_config import Interpolation, TrainConfig
from training.data.dataset import Data
from training.models.factory import Preprocess


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The description of a model, the content of `model.json`."""

    model: str
    """Architecture, a name for --model."""
    head_hidden: int
    transform_input: bool
    """Whether the model converts to another normalization, as torchvision's pretrained GoogLeNet and Inception do."""
    classes: tuple[str, ...]
    """Class names, in the order of the model's outputs."""
    crop_pct: float
    """Side of the center crop, as a share of the image's shorter side."""
    image_shape: tuple[int, int, int]
    """Channels, height and width of the images that the model takes. The crop is scaled to them."""
    channels: int
    """Number of channels after preprocessing, which repeats a single channel as needed."""
    size: int
    """Side in pixels after preprocessing, which scales normalized images of another `image_shape`."""
    mean: tuple[float, ...]
    """Mean of each channel, for pixel values from 0 to 1."""
    std: tuple[float, ...]
    amp: Literal["none", "bf16", "fp16"]
    """Precision of the training and of the model's test."""
    made_from: Mapping[str, Any]
    """Flags, data and versions from `training.evaluation.final_files`."""
    interpolation: Interpolation = "bilinear"
    """Interpolation with which images are scaled. Earlier versions, whose cards lack it, used bilinear."""

    def to_json(self) -> str:
        """Return the content of `model.json`."""
        return json.dumps({"format": 1, **asdict(self)}, indent=2) + "\n"

    def config(self) -> TrainConfig:
        """Return the flags that build the model."""
        weights = "./was-pretrained" if self.transform_input else None
        return TrainConfig(data=".", model=self.model, head_hidden=self.head_hidden, weights=weights, amp=self.amp)


def make_card(config: TrainConfig, data: Data, preprocess: Preprocess, made_from: Mapping[str, Any]) -> ModelCard:
    """Return the card of a training's model, whose evaluations use `preprocess`."""
    height, width = data.shape if data.in_memory else (preprocess.size, preprocess.size)
    return ModelCard(
        model=config.model,
        head_hidden=config.head_hidden,
        transform_input=config.weights is not None and config.model in {"googlenet", "inception_v3"},
        classes=data.classes,
        crop_pct=1.0 if data.in_memory else float(parse_crop_pct(config.eval_crop_pct)),
        interpolation=config.interpolation,
        image_shape=(data.channels, height, width),
        channels=preprocess.channels,
        size=preprocess.size,
        mean=data.mean,
        std=data.std,
        amp=config.amp,
        made_from=made_from,
    )


def read_card(text: str, source: str) -> ModelCard:
    """Return the card in `text`. Raises UserError, which names `source`, if it is damaged or of another version."""
    try:
        # msgspec's own reader refuses paths that are not UTF-8.
        return msgspec.convert(json.loads(text), ModelCard)
    except (ValueError, msgspec.ValidationError) as error:
        raise UserError(f"{source} is damaged or of another version ({error}): export or train again") from error
