"""`python -m training.export MODEL --format torch --output FILE`: a trained model as one file, for others to use.

Runs anywhere, as one process. The file is compared with the model on images of the test set before it is written.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from hpc.core import program
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.files import write_atomic
from training.config.command_line import listed
from training.config.dataset_layout import check_data, resolve_data
from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchRequest
from training.data.build import load_data
from training.data.loader import ImageSource
from training.inference.classifier import Classifier, find_model, load_classifier
from training.inference.exported_model import FORMATS, Classify, Format, require
from training.inference.model_card import ModelCard

_IMAGES = 64
# Sums in another order make differences of a millionth; another computation, of more.
_MOST_DIFFERENT = 1e-4


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a trained model into one file, which takes the bytes of images and gives the probabilities of classes.

    The normalisation is inside; cropping and scaling are not: `model.json`, which is in the file too, describes
    them, and `python -m training.predict FILE IMAGES...` does them. The file is compared with the model on images of
    the test set before it is written. Exit code 0: it is; 1: it failed, 2: your mistake (one line says what to type).
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run, or its final/ or best/ directory."""
    output: Path
    """The file."""
    format: Annotated[str, listed("What kind of file.", {name: kind.about for name, kind in FORMATS.items()})] = "torch"
    """A name of `training.inference.exported_model.FORMATS`."""
    data: str | None = None
    """Where the data set is, for the comparison; by default where it was trained from."""


def main() -> int:
    """From the command line to the exit code."""

    def work() -> int:
        print(export(program.parse(ExportOptions, sys.argv[1:], "python -m training.export")))
        return 0

    return program.run(work)


def export(arguments: ExportOptions) -> str:
    """Write the file.

    Returns:
        What was done, for people.

    Raises:
        UserError: a flag cannot work.
        TorchrelayError: the model cannot be exported, or the file gives other answers or cannot be written.
    """
    kind, output = _check(arguments), arguments.output.expanduser()
    classifier = load_classifier(find_model(arguments.model))
    part, images = real_images(classifier.card, arguments.data)
    try:
        content = kind.make(classifier)
    except Exception as error:
        # Whatever the exporters raise for models that they do not understand.
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise TorchrelayError(f"{classifier.card.model} cannot be exported as {arguments.format}: {reason}") from error
    difference = largest_difference(kind.use(content)[1], classifier, images)
    if not difference <= _MOST_DIFFERENT:
        raise TorchrelayError(
            f"nothing was written: the exported model gives other probabilities, by up to {difference:.3g} on "
            f"{len(images)} images of {part}"
        )
    try:
        write_atomic(output, content)
    except OSError as error:
        raise TorchrelayError(f"{output} cannot be written ({error}): give another --output") from error
    return (
        f"{output}: {len(content) / 1e6:.1f} MB, takes uint8 {['n', *classifier.card.pixels]}; on {len(images)} images "
        f"of {part} its probabilities differ from the model's by {difference:.1g} at most"
    )


def _check(arguments: ExportOptions) -> Format:
    kind = FORMATS.get(arguments.format)
    if kind is None:
        raise UserError(f"--format is {arguments.format!r}: use one of {', '.join(FORMATS)}")
    require(kind)
    if arguments.output.suffix != kind.suffix:
        raise UserError(f"--output is {arguments.output}: use a name that ends with {kind.suffix}")
    if not arguments.output.expanduser().parent.is_dir():
        raise UserError(f"--output is {arguments.output}, and there is no such directory: make it")
    return kind


def real_images(card: ModelCard, given: str | None) -> tuple[str, Tensor]:
    """Images of the data set that the model was made from, as it sees them, and what part of the data they are of.

    Returns:
        The part, such as `the test set`, and uint8 [n, channels, height, width].

    Raises:
        UserError: the data set is not there, or is another one.
    """
    name = given or card.made_from["data"]["path"]
    if not name:
        raise UserError("the model was trained on generated images: give --data, to compare with the exported one")
    try:
        layout = check_data(resolve_data(name))
    except UserError as error:
        raise UserError(f"{error} (the images that the exported model is tried on)") from error
    data = load_data(TrainConfig(data=name), layout, card.pixels[1])
    if (data.channels, *data.shape) != card.pixels or data.classes != card.classes:
        raise UserError(f"--data is {name}, whose images or classes are not those of the model: give its own data set")
    parts: dict[str, ImageSource | None] = {"the test set": data.test, "the validation set": data.val}
    part, source = next(((part, each) for part, each in parts.items() if each), ("the training set", data.train))
    places = range(0, len(source), max(1, len(source) // _IMAGES))[:_IMAGES]
    return part, source[BatchRequest(indices=tuple(places), epoch=None)].images


@torch.inference_mode()
def largest_difference(exported: Classify, classifier: Classifier, images: Tensor) -> float:
    """The largest difference between the probabilities of two models, of one image and of all others together."""
    batches = [batch for batch in (images[:1], images[1:]) if len(batch)]
    return float(torch.cat([(exported(batch) - classifier(batch)).abs() for batch in batches]).max())


if __name__ == "__main__":
    sys.exit(main())
