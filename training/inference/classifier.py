"""Rebuilds a trained model from `model.json` and its weights, to turn images into probabilities.

Runs wherever a model is exported or used; needs neither ranks nor a run directory.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hpc.base.errors import UserError
from hpc.base.files import expanded
from hpc.run.rundir import MODEL_CARD, MODEL_WEIGHTS, RunDir
from training.inference.model_card import ModelCard, read_card
from training.models.factory import Preprocess, autocast, build_model, first_line
from training.models.parallel import load_full_state_dict


class Classifier(nn.Module):
    """A model with its normalization before it and a softmax after it."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, card: ModelCard) -> None:
        super().__init__()
        self.card, self.model = card, model
        for name, values in (("mean", card.mean), ("std", card.std)):
            # Cloned, because an exported file would hold the whole storage of a view.
            self.register_buffer(name, torch.tensor(values)[:, None, None].clone())

    def forward(self, images: Tensor) -> Tensor:
        """Return the probabilities (float32 [n, classes]) of images (uint8 [n, *card.image_shape])."""
        card = self.card
        preprocess = Preprocess(
            mean=self.mean, std=self.std, channels=card.channels, size=card.size, interpolation=card.interpolation
        )
        return self.model(preprocess(images)).float().softmax(1)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def classify(self, images: Tensor) -> Tensor:
        """Return `forward`'s probabilities on the CPU, computed in the precision of the model's test."""
        with autocast(self.card.config(), self.mean.device):
            return self(images).cpu()  # type: ignore[no-any-return]


def find_model(name: str) -> Path:
    """Return a model's directory: the given one, `final/` of a run, or its `best/`. Raises UserError if none is."""
    path = expanded(name)
    run = RunDir(path if path.exists() or path.is_absolute() else Path("runs") / path)
    for directory in (run.path, run.final, run.best):
        if (directory / MODEL_CARD).is_file():
            return directory
    raise UserError(
        f"there is no model in {path}: give a run that has validated or is complete, its final/ or best/ directory, "
        "or an exported file"
    )


def load_classifier(directory: Path) -> Classifier:
    """Load the model in a directory with `model.json` and `model.safetensors`, in evaluation mode on the CPU.

    Raises UserError if the files are damaged, or do not belong together.
    """
    path = directory / MODEL_WEIGHTS
    try:
        card = read_card((directory / MODEL_CARD).read_text(encoding="utf-8"), str(directory / MODEL_CARD))
        model = build_model(card.config(), classes=len(card.classes), channels=card.channels, size=card.size)
        load_full_state_dict(model, load_file(path).items())
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{path} cannot be loaded ({first_line(error)}): copy all of {directory} again") from error
    return Classifier(model, card).eval()
