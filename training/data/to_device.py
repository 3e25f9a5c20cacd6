"""How tensors get to a rank's device without the host, or the device, waiting for them. Runs on every rank."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from training.data.dataset import Batch


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device. From pinned memory a GPU fetches them by itself; for other memory the host may wait."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def prefetch_to_device(batches: Iterator["Batch"], device: torch.device) -> Iterator["Batch"]:
    """The same batches, whose images and labels are on the GPU: each is made ready while the step before it computes.

    Copies, and what a source does on the GPU, are in a stream of their own. So each batch is asked for a step early.
    """
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # What the source holds on the GPU may still be on its way there.
    side.wait_stream(torch.cuda.current_stream(device))
    ready = _begun(batches, device, side)
    while ready is not None:
        current = torch.cuda.current_stream(device)
        # Before the next one is begun: this one alone is to be waited for.
        current.wait_stream(side)
        for tensor in (ready.images, ready.labels):
            # Their memory belongs to the side stream, which must not have it again before the step has used it.
            tensor.record_stream(current)
        batch, ready = ready, _begun(batches, device, side)
        yield batch


def _begun(batches: Iterator["Batch"], device: torch.device, side: torch.cuda.Stream) -> "Batch | None":
    with torch.cuda.stream(side):
        batch = next(batches, None)
        if batch is None:
            return None
        return batch._replace(images=to_device(batch.images, device), labels=to_device(batch.labels, device))
