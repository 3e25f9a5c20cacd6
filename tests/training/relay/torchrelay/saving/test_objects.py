"""A module's saved tensors are found again under the names that it has now."""

import pytest
import torch
from torch import nn
from torchrelay.rank_exchange import RankGroup
from torchrelay.saving.objects import Objects, Saveable, begin_loading, capture

ALONE = RankGroup(rank=0, local_rank=0, world_size=1, control=None)


def load(saved: Saveable, into: Saveable) -> None:
    captured = capture(Objects(shared={"model": saved}), 1, ALONE)
    wholes = {name: part.tensor.to("meta") for name, part in captured.parts.items()}
    parts, loads = begin_loading(Objects(shared={"model": into}), captured.values, b"", wholes)
    with torch.no_grad():
        for name, part in parts.items():
            part.tensor.copy_(captured.parts[name].tensor)
    for load in loads:
        load()


def filled(model: nn.Module, first: int) -> nn.Module:
    for number, parameter in enumerate(model.parameters(), first):
        nn.init.constant_(parameter, number)
    return model


class Two(nn.Module):
    """Has two parameters whose names differ by that of a wrapper alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.module = nn.Linear(2, 2, bias=False)


def test_names_that_differ_by_a_wrapper_alone_are_not_mixed_up() -> None:
    one, other = filled(Two(), 3), Two()
    load(one, other)
    assert [float(parameter.detach()[0, 0]) for parameter in other.parameters()] == [3, 4]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*module\.weight"):
        load(one, nn.Linear(2, 2, bias=False))


class Warmup(torch.optim.lr_scheduler.LambdaLR):
    """Has tensors in its state, and an optimizer that is not its own state."""

    def __init__(self, share: float) -> None:
        self.share, self.history = torch.tensor(share), [torch.tensor(share)]
        optimizer = torch.optim.SGD([nn.Parameter(torch.tensor(0.0))], lr=1.0)
        super().__init__(optimizer, lambda _: 1.0)


def test_scheduler_may_have_tensors() -> None:
    one, other = Warmup(0.5), Warmup(0.0)
    load(one, other)
    assert (float(other.share), float(other.history[0])) == (0.5, 0.5)
