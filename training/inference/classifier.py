"""A trained model as others use it: bytes of images in, probabilities out. Needs neither ranks nor a run.

Runs wherever a model is exported or used. All that it takes are the two files of a model, `model.json` and its weights.
"""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hpc.core.errors import UserError
from hpc.core.rundir import MODEL_CARD, MODEL_WEIGHTS, RunDir
from training.inference.model_card import ModelCard, read_card
from training.models.factory import Preprocess, build_model
from training.models.precision import autocast


class Classifier(nn.Module):
    """The model between the normalisation of bytes and the probabilities of the classes."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, card: ModelCard) -> None:
        super().__init__()
        self.card, self.model = card, model
        preprocess = Preprocess.make(card.mean, card.std, card.channels, card.size, torch.device("cpu"))
        # Tensors of its own, not views: so an exported file holds them once.
        self.register_buffer("mean", preprocess.mean.clone())
        self.register_buffer("std", preprocess.std.clone())
        self._preprocess = replace(preprocess, mean=self.mean, std=self.std)

    def forward(self, images: Tensor) -> Tensor:
        """Uint8 [n, channels, height, width] as in `Card.pixels` to float [n, classes], which add up to 1."""
        preprocess = replace(self._preprocess, mean=self.mean, std=self.std)
        return self.model(preprocess(images)).float().softmax(1)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def classify(self, images: Tensor) -> Tensor:
        """The same as an evaluation does it, in the precision that the model was tested in; on the CPU."""
        with autocast(self.card.config(), self.mean.device):
            return self(images).cpu()  # type: ignore[no-any-return]


def find_model(name: str) -> Path:
    """The directory of a model: of a run the final one, or the best one while there is no final one.

    Raises:
        UserError: there is none.
    """
    given = Path(name).expanduser()
    run = RunDir(given if given.exists() or given.is_absolute() else Path("runs") / given)
    places = (run.path, run.final, run.best)
    found = next((place for place in places if (place / MODEL_CARD).is_file()), None)
    if found is None:
        raise UserError(
            f"there is no model in {given}: give a run that has validated or is complete, its final/ or best/ "
            "directory, or an exported file"
        )
    return found


def load_classifier(directory: Path) -> Classifier:
    """The model in a directory with `model.json` and `model.safetensors`, ready for use.

    Raises:
        UserError: the files are damaged, or do not belong together.
    """
    path = directory / MODEL_WEIGHTS
    try:
        card = read_card((directory / MODEL_CARD).read_text(encoding="utf-8"), str(directory / MODEL_CARD))
        model = build_model(card.config(), classes=len(card.classes), channels=card.channels, size=card.size)
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be used ({reason}): copy {directory} again, as a whole") from error
    return Classifier(model, card).eval()
