"""Writes and loads exported models, `.pt2` and `.onnx` files. Runs where a model is exported or used.

An exported model takes images (uint8 [n, channels, height, width], any n) and returns probabilities (float32
[n, classes]). It includes the normalization and `model.json`, which describes how to prepare an image.
"""

import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc.base.errors import UserError, pip_install
from hpc.run.rundir import MODEL_CARD
from training.inference.classifier import Classifier
from training.inference.model_card import ModelCard, read_card
from training.models.factory import first_line

Classify = Callable[[Tensor], Tensor]
"""Function from images (uint8 [n, channels, height, width]) to probabilities (float32 [n, classes]), on the CPU."""

_METADATA = "torchrelay"


@dataclass(frozen=True, kw_only=True)
class Format:
    """A file format of exported models."""

    suffix: str
    serialize: Callable[[Classifier], bytes]
    """Function that returns the content of a file. It may raise any error of the exporter."""
    load: Callable[[bytes], tuple[str, Classify]]
    """Function that returns the text of the model card in a file's content, and the model."""
    packages: tuple[str, ...] = ()
    """Packages that the format needs besides torch."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch, whose exporters warn about their own code and whose loader logs the traceback of each error."""
    log = logging.getLogger("torch.export")
    disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = disabled


def _export(classifier: Classifier) -> torch.export.ExportedProgram:
    images = torch.zeros((2, *classifier.card.image_shape), dtype=torch.uint8)
    with torch.no_grad(), _quiet():
        return torch.export.export(classifier, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def _serialize_torch(classifier: Classifier) -> bytes:
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(_export(classifier), buffer, extra_files={MODEL_CARD: classifier.card.to_json()})
    return buffer.getvalue()


def _load_torch(content: bytes) -> tuple[str, Classify]:
    files = {MODEL_CARD: ""}
    with _quiet():
        model = torch.export.load(io.BytesIO(content), extra_files=files).module()
    return files[MODEL_CARD], torch.inference_mode()(model)


def _serialize_onnx(classifier: Classifier) -> bytes:
    with _quiet():
        program = torch.onnx.export(
            _export(classifier), input_names=["images"], output_names=["probabilities"], dynamo=True, verbose=False
        )
    assert program is not None  # noqa: S101  # only the older exporter returns None
    model: Any = program.model_proto
    model.metadata_props.add(key=_METADATA, value=classifier.card.to_json())
    return bytes(model.SerializeToString())


def _load_onnx(content: bytes) -> tuple[str, Classify]:
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def classify(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["probabilities"], {"images": images.numpy()})[0])

    return session.get_modelmeta().custom_metadata_map.get(_METADATA, ""), classify


FORMATS = {
    "torch": Format(
        suffix=".pt2",
        serialize=_serialize_torch,
        load=_load_torch,
    ),
    "onnx": Format(
        suffix=".onnx",
        serialize=_serialize_onnx,
        load=_load_onnx,
        packages=("onnx", "onnxscript", "onnxruntime"),
    ),
}


def require_packages(kind: Format) -> None:
    """Raise UserError, which says what to type, if a package of the format is not installed."""
    missing = [name for name in kind.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{kind.suffix} files need {', '.join(missing)}: type {pip_install(*kind.packages)}")


def load_exported(path: Path, kind: Format) -> tuple[ModelCard, Classify]:
    """Return the card and the model in an exported file. Raises UserError if it, or a package, is unusable."""
    require_packages(kind)
    try:
        text, classify = kind.load(path.read_bytes())
    except Exception as error:
        # torch and ONNX Runtime document no exceptions for damaged files.
        raise UserError(f"{path} cannot be loaded ({first_line(error)}): export the model again") from error
    return read_card(text, str(path)), classify
