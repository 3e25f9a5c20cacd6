"""How tensors get to a rank's device without the host, or the device, waiting for them. Runs on every rank."""

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device. From pinned memory a GPU fetches them by itself; for other memory the host may wait."""
    if device.type == "cpu" or values.device == device:
        return values
    return values.pin_memory().to(device, non_blocking=True)
