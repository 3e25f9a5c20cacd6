"""Sample predictions of a test, for the report: `samples.json`. Runs on rank 0, after the evaluation.

The choice of the images depends on the model alone, not on the number of ranks.
"""

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from training.data.batch_schedule import BatchRequest
from training.data.loader import ImageSource
from training.evaluation.evaluator import Evaluation

_SAMPLES = 12
# Large enough to recognise a photograph; all samples together take less than a megabyte.
_MAX_SIDE = 96


def samples_json(source: ImageSource, test: Evaluation, classes: Sequence[str]) -> str:
    """Images spread evenly over the test set (`even`), and the most confident errors (`mistake`).

    Raises:
        UserError: this node cannot read them.
    """
    groups = {"even": evenly_spread(source.labels, test), "mistake": most_confident_errors(source.labels, test)}
    samples = [_sample(source, test, classes, kind, index) for kind, indices in groups.items() for index in indices]
    return json.dumps(samples, indent=1) + "\n"


def evenly_spread(labels: Tensor, test: Evaluation) -> list[int]:
    """Indices of images spread evenly over the test set, right or wrong."""
    readable = sorted(set(range(len(labels))) - set(test.corrupt))
    count = min(_SAMPLES, len(readable))
    # From the middle of equal stretches: the first images of a folder are all of one class.
    return [readable[(2 * number + 1) * len(readable) // (2 * count)] for number in range(count)]


def most_confident_errors(labels: Tensor, test: Evaluation) -> list[int]:
    """Indices of wrongly predicted images, those with the highest probability first."""
    wrong = set((test.predicted != labels).nonzero().flatten().tolist()) - set(test.corrupt)
    return sorted(wrong, key=lambda index: (-float(test.probability[index]), index))[:_SAMPLES]


def _sample(source: ImageSource, test: Evaluation, classes: Sequence[str], kind: str, index: int) -> dict[str, Any]:
    batch = source[BatchRequest(indices=(index,), epoch=None)]
    return {
        "kind": kind,
        "index": index,
        "name": source.name(index),
        "true": classes[int(source.labels[index])],
        "predicted": classes[int(test.predicted[index])],
        "probability": round(float(test.probability[index]), 4),
        "png": base64.b64encode(_png(batch.images[0].cpu())).decode(),
    }


def _png(pixels: Tensor) -> bytes:
    """A small PNG of an image (uint8 [C, H, W]); unless it has 3 channels, of the first one."""
    array = pixels.permute(1, 2, 0).numpy() if len(pixels) == 3 else pixels[0].numpy()
    image, buffer = Image.fromarray(array), io.BytesIO()
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    image.save(buffer, "PNG")
    return buffer.getvalue()
