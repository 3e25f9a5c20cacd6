"""Sample predictions of a test, for people to look at: images with what they are and what they were taken for.

Runs on rank 0, after the evaluation. Which images they are depends on the model alone, not on the number of ranks.
"""

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from training.data.batch_schedule import BatchRequest
from training.data.dataset import ImageSource
from training.evaluation.evaluator import Evaluation

_EACH = 12
# Enough to recognise a photograph by; all of them together stay below a megabyte.
_LONGEST_SIDE = 96


def samples_json(source: ImageSource, test: Evaluation, classes: Sequence[str]) -> str:
    """Some images spread evenly over the test set, and the mistakes that the model was surest of.

    Raises:
        UserError: this node cannot read them.
    """
    groups = {"even": spread(source.labels, test), "mistake": surest_mistakes(source.labels, test)}
    chosen = [_sample(source, test, classes, kind, place) for kind, places in groups.items() for place in places]
    return json.dumps(chosen, indent=1) + "\n"


def spread(labels: Tensor, test: Evaluation) -> list[int]:
    """Places of images spread evenly over the test set, right or wrong."""
    places = sorted(set(range(len(labels))) - set(test.corrupt))
    count = min(_EACH, len(places))
    # In the middle of equal stretches: the first images of a folder are all of one class.
    return [places[(2 * number + 1) * len(places) // (2 * count)] for number in range(count)]


def surest_mistakes(labels: Tensor, test: Evaluation) -> list[int]:
    """Places of the images that were taken for another class with the highest probability, the highest first."""
    wrong = set((test.predicted != labels).nonzero().flatten().tolist()) - set(test.corrupt)
    return sorted(wrong, key=lambda place: (-float(test.probability[place]), place))[:_EACH]


def _sample(source: ImageSource, test: Evaluation, classes: Sequence[str], kind: str, place: int) -> dict[str, Any]:
    batch = source[BatchRequest(indices=(place,), epoch=None)]
    return {
        "kind": kind,
        "index": place,
        "name": source.name(place),
        "true": classes[int(source.labels[place])],
        "predicted": classes[int(test.predicted[place])],
        "probability": round(float(test.probability[place]), 4),
        "png": base64.b64encode(_png(batch.images[0].cpu())).decode(),
    }


def _png(pixels: Tensor) -> bytes:
    """A small picture of an image (uint8 [C, H, W]); of other numbers of channels than 1 and 3, of the first one."""
    array = pixels.permute(1, 2, 0).numpy() if len(pixels) == 3 else pixels[0].numpy()
    image, buffer = Image.fromarray(array), io.BytesIO()
    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    image.save(buffer, "PNG")
    return buffer.getvalue()
