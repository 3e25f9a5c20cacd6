"""`python -m training.predict MODEL IMAGES...`: what a trained model takes images for.

Runs anywhere, as one process, on a GPU if there is one. Images are looked at as in the evaluation of the training.
"""

import csv
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hpc.core import program
from hpc.core.errors import UserError
from training.inference.classifier import find_model, load_classifier
from training.inference.exported_model import FORMATS, Classify, format_of, load_exported
from training.inference.image_reader import ImageReader, UnreadableError, find_images
from training.inference.model_card import ModelCard

_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Say what a trained model takes images for, and how sure it is.

    An image that cannot be read is named, and does not keep the others from being told. Exit code 0: all images are
    told; 1: some are not, or it failed; 2: your mistake (one line says what to type).
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run, its final/ or best/ directory, or a file of `python -m training.export`."""
    images: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="IMAGES...")]
    """Image files, or directories: all images in and below them."""
    top: int = 1
    """How many classes to tell of each image, the likeliest first."""
    json: bool = False
    """Print one JSON document, and nothing else, on stdout."""
    csv: bool = False
    """Print CSV: a line for each image."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One image."""

    path: Path
    top: tuple[tuple[str, float], ...] = ()
    """Classes and their probabilities, the likeliest first."""
    error: str = ""
    """Why there are none."""


def main() -> int:
    """From the command line to the exit code: 1 if an image cannot be read."""

    def work() -> int:
        arguments = program.parse(PredictOptions, sys.argv[1:], "python -m training.predict")
        told = predict(arguments)
        _print(arguments, told)
        return int(any(each.error for each in told))

    return program.run(work)


def predict(arguments: PredictOptions) -> list[Prediction]:
    """What each image is taken for, in the order of the images.

    Raises:
        UserError: a flag cannot work, or there is no such model.
    """
    if arguments.json and arguments.csv:
        raise UserError("--json and --csv are two ways to print the same: leave out either")
    if arguments.top < 1:
        raise UserError(f"--top is {arguments.top}: use 1 or more")
    if not arguments.images:
        raise UserError("there are no images: name files or directories after the model")
    paths = list(find_images(arguments.images))
    card, classify = load(arguments.model)
    reader = ImageReader(card)
    told: list[Prediction] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for first in range(0, len(paths), _BATCH):
            batch = paths[first : first + _BATCH]
            images = list(zip(batch, pool.map(partial(_read, reader), batch), strict=True))
            told += tell(images, card, classify, arguments.top)
    return told


def load(model: str) -> tuple[ModelCard, Classify]:
    """A model of a run, or an exported one.

    Raises:
        UserError: there is none.
    """
    path = Path(model).expanduser()
    if kind := format_of(path) if path.is_file() else None:
        return load_exported(path, kind)
    if path.is_file():
        raise UserError(
            f"{path} is no exported model: its name ends with {' or '.join(k.suffix for k in FORMATS.values())}"
        )
    classifier = load_classifier(find_model(model))
    classifier.to("cuda" if torch.cuda.is_available() else "cpu")
    return classifier.card, classifier.classify


def _read(reader: ImageReader, path: Path) -> Tensor | str:
    """The image, or why there is none."""
    try:
        return reader.read(path)
    except UnreadableError as error:
        return str(error)


def tell(
    batch: Sequence[tuple[Path, Tensor | str]], card: ModelCard, classify: Classify, top: int
) -> Iterator[Prediction]:
    """What a batch of images is taken for. Those that cannot be read stand there with the reason."""
    readable = [image for _, image in batch if not isinstance(image, str)]
    answers = iter(_likeliest(classify(torch.stack(readable)), card.classes, top) if readable else [])
    for path, image in batch:
        yield Prediction(path=path, error=image) if isinstance(image, str) else Prediction(path=path, top=next(answers))


def _likeliest(probabilities: Tensor, classes: Sequence[str], top: int) -> list[tuple[tuple[str, float], ...]]:
    """For each image the names and the probabilities of the likeliest classes."""
    values, places = probabilities.topk(min(top, len(classes)), dim=1)
    return [
        tuple((classes[place], value) for place, value in zip(row, shares, strict=True))
        for row, shares in zip(places.tolist(), values.tolist(), strict=True)
    ]


# --- what is printed ---


def _print(arguments: PredictOptions, told: Sequence[Prediction]) -> None:
    if arguments.json:
        print(json.dumps([_record(each) for each in told], indent=2))
    elif arguments.csv:
        _print_csv(told, arguments.top)
    else:
        _print_table(told)
    for each in told:
        if each.error:
            print(f"warning: {each.path} cannot be read: {each.error}", file=sys.stderr)


def _record(told: Prediction) -> dict[str, Any]:
    if told.error:
        return {"path": str(told.path), "error": told.error}
    name, probability = told.top[0]
    top = [{"class": name, "probability": value} for name, value in told.top]
    return {"path": str(told.path), "class": name, "probability": probability, "top": top}


def _print_csv(told: Sequence[Prediction], top: int) -> None:
    widest = max([1, *(len(each.top) for each in told)])
    more = [f"{word}_{place}" for place in range(2, min(top, widest) + 1) for word in ("class", "probability")]
    writer = csv.writer(sys.stdout)
    writer.writerow(["path", "class", "probability", *more, "error"])
    for each in told:
        cells = [cell for name, value in each.top for cell in (name, f"{value:.6f}")]
        writer.writerow([each.path, *cells, *[""] * (2 * widest - len(cells)), each.error])


def _print_table(told: Sequence[Prediction]) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("image", "class", "probability"):
        table.add_column(column, justify="right" if column == "probability" else "left", overflow="fold")
    for each in (each for each in told if not each.error):
        for place, (name, value) in enumerate(each.top):
            table.add_row("" if place else Text(str(each.path)), Text(name), f"{value:.2%}")
    if table.rows:
        Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
