"""Blocks that are computed twice give the same bits, and keep less memory."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.trainings import Starter, final, same, slow
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchvision.models import convnext, swin_transformer, vision_transformer

from training.models.blocks import checkpoint_activations
from training.models.factory import SmallResNet


def vit() -> nn.Module:
    return vision_transformer.VisionTransformer(16, 8, 2, 2, 8, 16, dropout=0.2, num_classes=3)


def swin() -> nn.Module:
    sizes = {"patch_size": [2, 2], "window_size": [2, 2], "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2]}
    return swin_transformer.SwinTransformer(**sizes, stochastic_depth_prob=0.5, num_classes=3)


def convnext_of_two_stages() -> nn.Module:
    stages = [convnext.CNBlockConfig(8, 16, 2), convnext.CNBlockConfig(16, None, 1)]
    return convnext.ConvNeXt(stages, stochastic_depth_prob=0.5, num_classes=3)


MODELS = [vit, swin, convnext_of_two_stages, lambda: SmallResNet(8, 3, 3)]


def step(model: nn.Module, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], int]:
    """The gradients, batch statistics and next random number after a step, and the bytes kept outside of blocks."""
    kept = 0

    def keep(value: Tensor) -> Tensor:
        nonlocal kept
        kept += value.nbytes
        return value

    torch.manual_seed(3)
    images = torch.rand(4, 3, 16, 16)
    with saved_tensors_hooks(keep, lambda value: value), torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(images).float().square().sum()
    loss.backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return found | dict(model.named_buffers()) | {"random": torch.rand(1)}, kept


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_bits_are_the_same_and_less_is_kept(make: Callable[[], nn.Module], dtype: torch.dtype | None) -> None:
    plain = make().train()
    model = copy.deepcopy(plain)
    assert checkpoint_activations(model) >= 2
    for _ in range(2):
        (one, all_of_it), (other, rest) = step(plain, dtype), step(model, dtype)
        assert one.keys() == other.keys()
        assert not [name for name, value in one.items() if not torch.equal(value, other[name])]
        assert rest < all_of_it / 2
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp")])
def test_a_training_may_compute_again_from_its_middle_on(start: Starter, strategy: str) -> None:
    flags = ("--model=resnet20", "--epochs=1", "--batch-size=90", f"--strategy={strategy}")
    whole = start.complete(*flags, run="whole", world_size=2).run_dir
    cut = start(*flags, "--fault=stop@1:0", run="cut", world_size=2)
    assert cut.wait() == [0, 0], cut.output()
    start.complete(*flags, "--checkpoint-activations", run="cut", world_size=2)
    assert same(final(whole), final(cut.run_dir))


def test_a_model_without_blocks_is_refused(start: Starter) -> None:
    training = start("--checkpoint-activations")
    assert training.wait() == [2]
    assert "finds no blocks to recompute in small-cnn: leave it out" in training.output()
