"""Files of exported models: what is written into them, and how they are used. Needs neither ranks nor a run.

A file takes bytes (uint8 [n, channels, height, width], any n) and gives probabilities (float [n, classes]); the
normalisation is inside. Its `model.json` says how an image becomes these bytes.
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

from hpc.core.errors import UserError
from hpc.core.rundir import MODEL_CARD
from training.inference.classifier import Classifier
from training.inference.model_card import ModelCard, read_card

Classify = Callable[[Tensor], Tensor]
"""Uint8 [n, channels, height, width] to float [n, classes], both on the CPU."""

_ONNX_PACKAGES = "onnx", "onnxscript", "onnxruntime"
_METADATA = "torchrelay"
# A protobuf cannot be larger.
_MOST_ONNX_BYTES = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of exported file."""

    suffix: str
    about: str
    make: Callable[[Classifier], bytes]
    """The content of a file. Raises what the exporter raises."""
    use: Callable[[bytes], tuple[str, Classify]]
    """Of a file's content, the text of its card, and the model."""
    needs: tuple[str, ...] = ()
    """Packages beside torch."""


def _export(classifier: Classifier) -> torch.export.ExportedProgram:
    images = torch.zeros((2, *classifier.card.pixels), dtype=torch.uint8)
    with torch.no_grad(), _quiet():
        return torch.export.export(classifier, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch's exporters warn of their own code, and its loader logs the traceback of what it then raises."""
    log = logging.getLogger("torch.export")
    disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = disabled


def _make_torch(classifier: Classifier) -> bytes:
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(_export(classifier), buffer, extra_files={MODEL_CARD: classifier.card.to_json()})
    return buffer.getvalue()


def _use_torch(content: bytes) -> tuple[str, Classify]:
    files = {MODEL_CARD: ""}
    with _quiet():
        model = torch.export.load(io.BytesIO(content), extra_files=files).module()

    def classify(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(images)  # type: ignore[no-any-return]

    return files[MODEL_CARD], classify


def _make_onnx(classifier: Classifier) -> bytes:
    with _quiet():
        program = torch.onnx.export(
            _export(classifier), input_names=["images"], output_names=["probabilities"], dynamo=True, verbose=False
        )
    assert program is not None  # noqa: S101  # it is for the older exporter alone
    model: Any = program.model_proto
    model.metadata_props.add(key=_METADATA, value=classifier.card.to_json())
    if (size := model.ByteSize()) > _MOST_ONNX_BYTES:
        raise ValueError(f"it has {size / 1e9:.1f} GB, and ONNX files end at 2 GB")
    return bytes(model.SerializeToString())


def _use_onnx(content: bytes) -> tuple[str, Classify]:
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def classify(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["probabilities"], {"images": images.numpy()})[0])

    return session.get_modelmeta().custom_metadata_map.get(_METADATA, ""), classify


FORMATS = {
    "torch": Format(
        suffix=".pt2",
        about="a program of torch.export, which torch alone can run, without this package",
        make=_make_torch,
        use=_use_torch,
    ),
    "onnx": Format(
        suffix=".onnx",
        about="for ONNX Runtime and what else reads ONNX",
        make=_make_onnx,
        use=_use_onnx,
        needs=_ONNX_PACKAGES,
    ),
}


def format_of(path: Path) -> Format | None:
    """The format of a file by its name; None: it is none of ours."""
    return next((kind for kind in FORMATS.values() if kind.suffix == path.suffix), None)


def require(kind: Format) -> None:
    """Make sure that the packages of a format are installed.

    Raises:
        UserError: one of them is not; says what to type.
    """
    missing = [name for name in kind.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{kind.suffix} files need {', '.join(missing)}: pip install {' '.join(kind.needs)}")


def load_exported(path: Path, kind: Format) -> tuple[ModelCard, Classify]:
    """An exported model.

    Raises:
        UserError: the file cannot be read, or is another's.
    """
    require(kind)
    try:
        text, classify = kind.use(path.read_bytes())
    except Exception as error:
        # Whatever torch and ONNX Runtime say of files that they cannot read.
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise UserError(f"{path} cannot be used ({reason}): export the model again") from error
    return read_card(text, str(path)), classify
