"""Optimisers, schedules and scalings do what they say: what torch's own do, or the closed form."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import get_args

import pytest
import torch
from support.trainings import Starter, lines
from torch import nn, optim
from torch._subclasses import FakeTensorMode
from torch.optim import lr_scheduler
from torchvision import models

from training.config.train_config import LrScheduler, Optimizer, TrainConfig
from training.engine.optim import (
    decayed_names,
    follow_plateau,
    layer_scales,
    learning_rate,
    make_optimizer,
    make_sgd,
    set_learning_rate,
)
from training.runtime.train_progress import Progress

EPOCH = 10


def rates(**settings: object) -> list[float]:
    """The learning rates of all steps, with 10 steps an epoch."""
    config = TrainConfig(data="x", **{"lr": 0.4, "epochs": 10, "warmup_epochs": 0, **settings})  # type: ignore[arg-type]
    return [learning_rate(config, EPOCH, Progress(step=step)) for step in range(EPOCH * config.epochs)]


def rates_of_torch(make: Callable[[optim.Optimizer], lr_scheduler.LRScheduler], steps: int) -> list[float]:
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"lr_scheduler": "cosine", "min_lr": 0.1}, partial(lr_scheduler.CosineAnnealingLR, T_max=100, eta_min=0.1)),
        ({"lr_scheduler": "constant"}, partial(lr_scheduler.ConstantLR, factor=1)),
        ({"lr_scheduler": "step", "lr_step_epochs": "3"}, partial(lr_scheduler.StepLR, step_size=30)),
        (
            {"lr_scheduler": "step", "lr_step_epochs": "2,7", "lr_gamma": 0.5},
            partial(lr_scheduler.MultiStepLR, milestones=[20, 70], gamma=0.5),
        ),
    ],
)
def test_a_schedule_is_that_of_torch(
    settings: dict[str, object], make: Callable[[optim.Optimizer], lr_scheduler.LRScheduler]
) -> None:
    assert rates(**settings) == pytest.approx(rates_of_torch(make, 100), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("schedule", get_args(LrScheduler))
def test_the_warm_up_is_a_line_to_the_highest_rate(schedule: str) -> None:
    found = rates(lr_scheduler=schedule, warmup_epochs=1.5)
    assert found[:15] == pytest.approx([0.4 * (step + 1) / 15 for step in range(15)])
    assert found[15] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("batch_size", "none", "sqrt", "linear"), [(256, 1, 1, 1), (1024, 1, 2, 4), (64, 1, 0.5, 0.25)]
)
def test_the_rate_is_scaled_by_the_global_batch(batch_size: int, none: float, sqrt: float, linear: float) -> None:
    wanted = {"none": none, "sqrt": sqrt, "linear": linear}
    found = {name: rates(lr_scaling=name, batch_size=batch_size, lr_scheduler="constant")[0] for name in wanted}
    assert found == pytest.approx({name: 0.4 * factor for name, factor in wanted.items()})


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, 0.15),
        ({"batch_size": 128}, 0.075),
        ({"optimizer": "adam"}, 0.001),
        ({"optimizer": "adamw", "batch_size": 128}, 0.0005),
        # With a scaling, --lr is that of 256 images, given or not.
        ({"batch_size": 1024, "lr_scaling": "linear"}, 0.15 * 2**-0.5 * 4),
    ],
)
def test_the_default_rate_goes_with_the_batch_and_the_optimizer(settings: dict[str, object], wanted: float) -> None:
    assert rates(lr=None, lr_scheduler="constant", **settings)[0] == pytest.approx(wanted)


# --- plateau ---

LOSSES = [1.0, 0.9, 0.91, 0.92, 0.9, 0.89995, 0.8, 0.81, 0.82, 0.83, 0.84, 0.85, 0.86, 0.87, 0.5]


@pytest.mark.parametrize("losses", [LOSSES, [math.nan, *LOSSES], [1.0, math.nan, math.inf, *LOSSES]])
@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_is_that_of_torch_also_over_restarts(patience: int, losses: list[float]) -> None:
    config = TrainConfig(data="x", lr_scheduler="plateau", plateau_patience=patience, lr_gamma=0.3, lr=1.0)
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=patience)
    progress, found, expected = Progress(step=10**6), [], []
    for loss in losses:
        # As a restart does it after every epoch: what a state knows goes through JSON.
        progress = Progress(**json.loads(json.dumps(asdict(progress))))
        follow_plateau(config, progress, loss)
        reference.step(loss)
        found.append(learning_rate(config, EPOCH, progress))
        expected.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(expected)
    assert found[-1] < 1


@pytest.mark.parametrize("warmup", [1, 5])
def test_plateau_does_not_count_the_epochs_of_the_warm_up(warmup: int) -> None:
    config = TrainConfig(
        data="x", lr_scheduler="plateau", plateau_patience=1, lr_gamma=0.5, lr=1.0, warmup_epochs=warmup
    )
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    progress, found, expected = Progress(), [], []
    for epoch in range(1, 12):
        progress.step, progress.epoch = epoch * EPOCH, epoch
        follow_plateau(config, progress, float(epoch))
        if epoch > warmup:
            reference.step(float(epoch))
            found.append(learning_rate(config, EPOCH, progress))
            expected.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(expected)
    assert found[-1] < found[0] == 1


def test_plateau_lowers_the_rate_of_a_training_whose_loss_does_not_fall(start: Starter) -> None:
    # A rate so small that the loss stays the same to the last digit.
    flags = ("--lr-scheduler=plateau", "--plateau-patience=1", "--lr-gamma=0.5", "--lr=1e-20", "--weight-decay=0")
    flags = (*flags, "--epochs=6", "--batch-size=50", "--warmup-epochs=0", "--log-every=1")
    stopped = start(*flags, "--fault=stop@8:0")
    assert stopped.wait() == [0], stopped.output()
    run = start.complete(*flags).run_dir
    by_epoch = {line["epoch"]: line["lr"] for line in lines(run / "metrics" / "train.jsonl")}
    # The first loss is the lowest; after one epoch more than it bears, the rate is halved, and so on.
    assert list(by_epoch.values()) == [1e-20, 1e-20, 1e-20, 0.5e-20, 0.5e-20, 0.25e-20]


# --- optimisers ---


def updated(name: str, **settings: object) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """Weights after three steps with gradients of one, and the model with the weights before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config = TrainConfig(data="x", optimizer=name, lr=0.1, **settings)  # type: ignore[arg-type]
    take_steps(make_optimizer(config, model), model)
    after = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(before)
    return after, model


def take_steps(optimizer: optim.Optimizer, model: nn.Module) -> None:
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "settings", "reference"),
    [
        ("sgd", {}, partial(optim.SGD, momentum=0.8)),
        ("sgd", {"nesterov": True}, partial(optim.SGD, momentum=0.8, nesterov=True)),
        ("adamw", {}, partial(optim.AdamW, betas=(0.8, 0.999))),
        ("adam", {}, partial(optim.Adam, betas=(0.8, 0.999))),
    ],
)
def test_an_optimizer_is_that_of_torch(
    name: str, settings: dict[str, object], reference: Callable[..., optim.Optimizer]
) -> None:
    after, model = updated(name, momentum=0.8, weight_decay=0.02, decay_norm_and_bias=True, **settings)
    take_steps(reference(model.parameters(), lr=0.1, weight_decay=0.02), model)
    assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", get_args(Optimizer))
def test_biases_and_norms_decay_only_if_they_should(name: str) -> None:
    plain, decayed, all_decayed = (
        updated(name, **settings)[0]
        for settings in (
            {"weight_decay": 0.0},
            {"weight_decay": 0.1},
            {"weight_decay": 0.1, "decay_norm_and_bias": True},
        )
    )
    weights = {"0.weight", "3.weight"}
    # Norms begin at one; their biases at zero, which decay cannot change at once, but the steps move them.
    others = {"0.bias", "1.weight", "1.bias", "3.bias"}
    assert {key for key in weights | others if not torch.equal(plain[key], decayed[key])} == weights
    assert {key for key in weights | others if not torch.equal(plain[key], all_decayed[key])} == weights | others


def torchvision_model(name: str) -> nn.Module:
    with torch.device("meta"):
        return models.get_model(name)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "spared"),
    [
        ("resnet18", set()),
        ("vit_b_16", {"class_token", "pos_embedding"}),
        ("swin_v2_t", {"logit_scale", "cpb_mlp.0.weight", "cpb_mlp.2.weight"}),
        ("convnext_tiny", {"layer_scale"}),
    ],
)
def test_embeddings_and_scales_do_not_decay_whatever_their_shape(name: str, spared: set[str]) -> None:
    model = torchvision_model(name)
    decayed = decayed_names(model)
    kept = {key for key, value in model.named_parameters() if value.dim() > 1} - decayed
    assert {end for end in spared for key in kept if key.endswith(end)} == spared
    assert not [key for key in kept if not key.endswith(tuple(spared))]
    modules = dict(model.named_modules())
    linear = {f"{key}.weight" for key, module in modules.items() if isinstance(module, nn.Linear | nn.Conv2d)}
    assert {key for key in linear if "cpb_mlp" not in key} <= decayed


@pytest.mark.parametrize(
    ("name", "layers", "powers"),
    [
        (
            "vit_b_16",
            14,
            {
                "class_token": 13,
                "encoder.pos_embedding": 13,
                "conv_proj.weight": 13,
                "heads.head.bias": 0,
                "encoder.layers.encoder_layer_0.ln_1.weight": 12,
                "encoder.ln.weight": 1,
            },
        ),
        ("resnet18", 10, {"conv1.weight": 9, "bn1.bias": 9, "layer1.0.conv1.weight": 8, "layer4.1.bn2.bias": 1}),
    ],
)
def test_the_rate_of_a_layer_decays_with_the_blocks_after_it(name: str, layers: int, powers: dict[str, int]) -> None:
    found = layer_scales(torchvision_model(name), 0.5)
    assert sorted(set(found.values())) == [0.5**power for power in reversed(range(layers))]
    assert {key: found[key] for key in powers} == {key: 0.5**power for key, power in powers.items()}


def test_layers_are_trained_at_their_rates_and_the_head_at_that_of_the_schedule() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = make_optimizer(TrainConfig(data="x", layer_decay=0.5, momentum=0, weight_decay=0), model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    set_learning_rate(optimizer, 0.25)
    take_steps(optimizer, model)
    moved = {name: round(float((before[name] - value).mean()), 4) for name, value in model.state_dict().items()}
    assert moved == {
        f"{layer}.{kind}": 3 * 0.25 * 0.5 ** (2 - layer) for layer in range(3) for kind in ("weight", "bias")
    }
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("name", get_args(Optimizer))
def test_an_optimizer_of_parameters_on_cuda_is_fused(name: str) -> None:
    config = TrainConfig(data="x", optimizer=name)
    # Tensors without memory, which say that they are on a GPU.
    with FakeTensorMode():
        on_gpu = make_optimizer(config, nn.Linear(2, 2, device="cuda"))
        sharded = make_optimizer(replace(config, strategy="fsdp"), nn.Linear(2, 2, device="cuda"))
    assert on_gpu.defaults["fused"] is True
    assert not make_optimizer(config, nn.Linear(2, 2)).defaults["fused"]
    assert bool(sharded.defaults["fused"]) == (name != "sgd"), "torch cannot shard it"


def test_momentum_is_zero_after_a_first_step_that_overflowed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise new memory holds anything, zeros too.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        weights = nn.Parameter(torch.ones(3))
        scaler = torch.amp.GradScaler("cpu")
        sgd = make_sgd([{"params": [weights]}], TrainConfig(data="x", momentum=0.5), {"lr": 1, "fused": True})
        for gradient in (math.inf, 1.0, 1.0):
            sgd.zero_grad()
            scaler.scale(gradient * weights.sum()).backward()
            scaler.step(sgd)
            scaler.update()
    finally:
        torch.use_deterministic_algorithms(False)
    assert weights.tolist() == [1 - 1 - 1.5] * 3
