"""`python -m training.inference.predict MODEL IMAGES...`: predicts the classes of images.

Runs anywhere, as one process, on a GPU if one is usable. Images are prepared as in the evaluations of the training.
"""

import csv
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.files import expanded
from hpc.base.flags import Flag
from hpc.base.text import csv_cell, file_name, visible
from training.config.dataset_layout import is_ignored, is_image
from training.data.image_folder import as_rgb, decode_image, with_image
from training.data.transforms.crop import CenterCrop
from training.inference.classifier import find_model, load_classifier
from training.inference.exported_model import FORMATS, Classify, load_exported
from training.inference.model_card import ModelCard

_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Predict the classes of images, with their probabilities.

    An image that cannot be read is reported on stderr; the others are predicted. Exit codes: 0 done, 1 failed or some
    images could not be read, 2 your mistake (one line says what to type).
    """

    model: Annotated[str, Flag(metavar="MODEL", is_positional=True)]
    """A run, its final/ or best/ directory, or a file that `hpc export` wrote."""
    images: Annotated[tuple[Path, ...], Flag(metavar="IMAGES...", is_positional=True)]
    """Image files, or directories: all images in and below them."""
    top: int = 1
    """Number of classes to print for each image, the most likely first."""
    json: bool = False
    """Print one JSON document, and nothing else, on stdout."""
    csv: bool = False
    """Print CSV, one line for each image."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for an image."""

    path: Path
    top: tuple[tuple[str, float], ...] = ()
    """Classes and their probabilities, the most likely first."""
    error: str = ""
    """Reason why the image cannot be read; empty if it can."""


def main() -> int:
    """Run the program, and return its exit code."""
    options = program.parse(PredictOptions, sys.argv[1:], program.called("training.inference.predict"))
    predictions = predict(options)
    if options.json:
        program.print_json([_record(prediction) for prediction in predictions])
    elif options.csv:
        _print_csv(predictions, options.top)
    else:
        _print_table(predictions)
    unreadable = [prediction for prediction in predictions if prediction.error]
    for prediction in unreadable:
        print(visible(f"warning: {prediction.path} cannot be read: {prediction.error}"), file=sys.stderr)
    return 1 if unreadable else 0


def predict(options: PredictOptions) -> list[Prediction]:
    """Return the prediction for each image, in the order of `find_images`.

    Raises UserError if an option cannot work, the model does not exist, or it takes neither gray nor color images.
    """
    if options.json and options.csv:
        raise UserError("--json and --csv exclude each other: use one of them")
    if options.top < 1:
        raise UserError(f"--top is {options.top}: use 1 or more")
    if not options.images:
        raise UserError("there are no images: name files or directories after the model")
    paths = list(find_images(options.images))
    card, classify = load(options.model)
    if card.image_shape[0] not in {1, 3}:
        raise UserError(f"the model takes images of {card.image_shape[0]} channels: image files have 1 or 3")
    read = partial(_read, card)
    predictions: list[Prediction] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for first in range(0, len(paths), _BATCH):
            batch = paths[first : first + _BATCH]
            images = list(pool.map(read, batch))
            readable = [image for image in images if not isinstance(image, str)]
            likely = iter(_most_likely(classify(torch.stack(readable)), card.classes, options.top) if readable else [])
            for path, image in zip(batch, images, strict=True):
                if isinstance(image, str):
                    predictions.append(Prediction(path=path, error=image))
                else:
                    predictions.append(Prediction(path=path, top=next(likely)))
    return predictions


def find_images(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the given files, and for each given directory the images in and below it, sorted by name.

    Raises UserError if a directory has no images.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        names = list[str]()
        for directory, below, files in os.walk(path):
            below[:] = [name for name in below if not is_ignored(name)]
            names += (os.path.join(directory, name) for name in files if is_image(name))  # noqa: PTH118  # for a million
        if not names:
            raise UserError(f"there are no images in {path}: give files, or a directory with some")
        yield from map(Path, sorted(names))


def load(model: str) -> tuple[ModelCard, Classify]:
    """Return card and model of a run or an exported file. Raises UserError if it cannot be loaded."""
    path = expanded(model)
    if not path.is_file():
        classifier = load_classifier(find_model(model))
        classifier.to("cuda" if torch.cuda.is_available() else "cpu")
        return classifier.card, classifier.classify
    by_suffix = {kind.suffix: kind for kind in FORMATS.values()}
    if path.suffix not in by_suffix:
        suffixes = " or ".join(by_suffix)
        raise UserError(
            f"{path} is not an exported model: give a run, its final/ or best/ directory, or a {suffixes} file"
        )
    return load_exported(path, by_suffix[path.suffix])


def _read(card: ModelCard, path: Path) -> Tensor | str:
    """Return the image (uint8 [*card.image_shape]), prepared as in evaluations, or why it cannot be read."""
    channels, height, width = card.image_shape
    crop = CenterCrop(size=(height, width), crop_pct=card.crop_pct, interpolation=card.interpolation)
    try:
        content = path.read_bytes()
        if channels == 3:
            image = decode_image(content, crop)
        else:
            gray = with_image(content, lambda file: np.array(as_rgb(file).convert("L")))
            image = None if gray is None else crop.of(torch.from_numpy(gray)[..., None])
    except OSError as error:
        return error.strerror or str(error)
    except UserError as error:
        return str(error)
    return "it is not an image, or it is damaged" if image is None else image


def _most_likely(probabilities: Tensor, classes: Sequence[str], top: int) -> list[tuple[tuple[str, float], ...]]:
    """Return the most likely classes of each image, a row of `probabilities`, with their probabilities."""
    values, indices = probabilities.topk(min(top, len(classes)), dim=1)
    return [
        tuple((classes[index], value) for index, value in zip(*row, strict=True))
        for row in zip(indices.tolist(), values.tolist(), strict=True)
    ]


# --- printing ---


def _record(prediction: Prediction) -> dict[str, Any]:
    path = file_name(str(prediction.path))
    if prediction.error:
        return {"path": path, "error": prediction.error}
    name, probability = prediction.top[0]
    top = [{"class": name, "probability": value} for name, value in prediction.top]
    return {"path": path, "class": name, "probability": probability, "top": top}


def _print_csv(predictions: Sequence[Prediction], top: int) -> None:
    columns = max([1, *(len(prediction.top) for prediction in predictions)])
    more = [f"{word}_{number}" for number in range(2, min(top, columns) + 1) for word in ("class", "probability")]
    writer = csv.writer(sys.stdout)
    writer.writerow(["path", "class", "probability", *more, "error"])
    for prediction in predictions:
        cells = [cell for name, value in prediction.top for cell in (name, f"{value:.6f}")]
        row = [file_name(str(prediction.path)), *cells, *[""] * (2 * columns - len(cells)), prediction.error]
        writer.writerow(map(csv_cell, row))


def _print_table(predictions: Sequence[Prediction]) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("image", "class", "probability"):
        table.add_column(column, justify="right" if column == "probability" else "left", overflow="fold")
    for prediction in predictions:
        for number, (name, value) in enumerate(prediction.top):
            table.add_row("" if number else Text(visible(str(prediction.path))), Text(visible(name)), f"{value:.2%}")
    if table.rows:
        Console().print(table)


if __name__ == "__main__":
    sys.exit(program.run(main, words=sys.argv))
