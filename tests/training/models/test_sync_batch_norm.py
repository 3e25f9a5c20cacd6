"""Batch normalization over all ranks computes what torch's own computes on the whole batch.

With more than one rank: tests/training/engine/test_trainer_options.py.
"""

import pytest
import torch
from torch import Tensor, nn

from training.models.sync_batch_norm import convert_sync_batch_norm


def train(norm: nn.Module, images: list[Tensor]) -> list[Tensor]:
    """Outputs, gradients and statistics of some steps; the loss weighs each channel by its number."""
    found = []
    for values in images:
        inputs = values.clone().requires_grad_()
        outputs = norm(inputs)
        weights = torch.arange(1, values.shape[1] + 1).view(1, -1, *[1] * (values.dim() - 2))
        torch.autograd.backward((outputs.square() * weights).sum() + outputs.pow(3).sum())
        assert inputs.grad is not None
        found += [outputs.detach(), inputs.grad]
    return [*found, *(parameter.grad for parameter in norm.parameters() if parameter.grad is not None), *norm.buffers()]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize(("kind", "shape"), [(nn.BatchNorm1d, (7, 5)), (nn.BatchNorm2d, (7, 5, 4, 3))])
def test_one_rank_computes_what_torch_does(
    kind: type[nn.Module], shape: tuple[int, ...], momentum: float | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    plain, shared = (kind(5, momentum=momentum, dtype=torch.float64) for _ in range(2))
    images = [10 + 3 * torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2)]
    for name, parameter in plain.named_parameters():
        nn.init.uniform_(parameter, generator=generator)
        shared.get_parameter(name).data.copy_(parameter)
    shared = convert_sync_batch_norm(shared)
    for expected, found in zip(train(plain, images), train(shared, images), strict=True):
        assert torch.allclose(expected, found, rtol=1e-8, atol=1e-8)
    assert torch.allclose(plain.eval()(images[0]), shared.eval()(images[0]))
