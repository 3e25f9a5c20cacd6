"""What each option of the optimisation does, against torch's own or torchvision's where they have the same."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.trainings import Starter, events, final, trainer_with
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpc.commands.start.submit import main as submit
from training.config.train_config import TrainConfig
from training.data.transforms.mixup import Mixup, draw_mix, mix_images, mix_labels
from training.engine.loss_meter import LossMeter
from training.models.ema import Ema
from training.models.factory import build_model
from training.runtime.process_group import ProcessGroup

# One step of plain gradient descent on everything.
ONE_STEP = ("--epochs=1", "--batch-size=193", "--momentum=0", "--weight-decay=0", "--warmup-epochs=0", "--lr=0.1")


def test_the_moving_average_equals_that_of_torch() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ema = Ema(model, 0.1)  # so low that it is not lowered further in the beginning
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.1), use_buffers=True)
    reference.update_parameters(model)
    for step in range(1, 6):
        model(torch.randn(8, 3, generator=torch.Generator().manual_seed(step)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        ema.update(step)
        reference.update_parameters(model)
    expected = reference.module.state_dict()
    floating = [name for name, value in expected.items() if value.is_floating_point()]
    assert len(floating) == 6
    assert all(torch.allclose(ema.model.state_dict()[name], expected[name]) for name in floating)
    assert int(ema.model.state_dict()["1.num_batches_tracked"]) == 5


def test_the_moving_average_forgets_the_first_weights_quickly() -> None:
    model = nn.Linear(1, 1, bias=False)
    ema = Ema(model, 0.9999)
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(ema.model.weight, 0.0)
    for step in range(1, 101):
        ema.update(step)
    assert float(ema.model.weight) > 0.99


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_gradients_are_clipped_to_the_norm_after_they_are_unscaled(start: Starter, amp: str) -> None:
    run = start.complete(
        *ONE_STEP, "--lr-scheduler=constant", "--clip-grad-norm=0.01", f"--amp={amp}", world_size=2
    ).run_dir
    config = TrainConfig(data=str(start.data))
    before = build_model(config, classes=3, channels=1, size=12).state_dict()
    step = torch.cat([(final(run)[name] - value).flatten() for name, value in before.items()])
    assert float(step.norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_a_step_whose_float16_gradients_overflow_is_left_out_and_the_scale_halved(
    group: ProcessGroup, idx_data: Path, tmp_path: Path
) -> None:
    trainer = trainer_with(group, idx_data, tmp_path / "run", lr=0.15, amp="fp16", epochs=1)
    trainer.state.scaler.load_state_dict({**trainer.state.scaler.state_dict(), "scale": 2.0**40})
    before = [parameter.detach().clone() for parameter in trainer.state.model.parameters()]
    batch = trainer.data.train[next(trainer.schedule.requests(0, 0, 0, 1))]
    trainer.stepper.step(batch, LossMeter(group))
    assert trainer.state.scaler.get_scale() == 2.0**39
    assert all(map(torch.equal, before, trainer.state.model.parameters()))
    assert trainer.state.progress.step == 1
    while trainer.state.scaler.get_scale() > 2.0**16:
        trainer.stepper.step(batch, LossMeter(group))
    trainer.stepper.step(batch, LossMeter(group))
    assert not any(map(torch.equal, before, trainer.state.model.parameters()))


def test_synchronized_normalization_is_refused_on_cpus(
    start: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "--sync-bn needs GPUs, because torch's SyncBatchNorm refuses CPUs: leave it out\n"
    flags = ("--model=resnet20", "--sync-bn")
    refused = start(*flags, world_size=2)
    assert refused.wait() == [2, 2]
    assert f"error: {reason}" in refused.output()
    where = ["--cluster=local", "--dry-run", f"--runs-dir={tmp_path}", f"--data={start.data}"]
    assert submit([*where, *flags, "--device=cpu"]) == 2
    assert capsys.readouterr().err == f"hpc submit: {reason}"


def nondeterministic_model(classes: int, channels: int, size: int) -> nn.Module:
    """A model with an operation that has no deterministic kernel."""

    class Nondeterministic(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values.clone().put_(torch.tensor([0]), torch.zeros(1))

    return nn.Sequential(Nondeterministic(), nn.Flatten(), nn.Linear(channels * size * size, classes))


def use_nondeterministic_model() -> None:
    from training.models import factory

    factory.small_cnn = nondeterministic_model  # type: ignore[assignment]


def test_strict_repeatability_refuses_an_operation_without_deterministic_kernel(start: Starter) -> None:
    allowed = start.complete("--epochs=1", "--batch-size=20", run="allowed", prepare=use_nondeterministic_model)
    assert events(allowed.run_dir, "unrepeatable")[0]["detail"] == "put_"
    assert (
        "put_: there is no deterministic kernel here, so an interrupted training may end with different"
        in allowed.output()
    )
    refused = start("--epochs=1", "--batch-size=20", "--deterministic=error", prepare=use_nondeterministic_model)
    assert refused.wait() == [2], refused.output()
    said = "error: --deterministic error does not work with small-cnn here: put_ has no deterministic kernel: use"
    assert said in refused.output()
    assert "Traceback" not in refused.output()


# --- mixing ---


def test_mixup_of_a_pair_is_that_of_torchvision() -> None:
    from torchvision.transforms import v2

    images, labels = torch.rand(2, 3, 8, 8), torch.tensor([0, 2])
    expected, targets = v2.MixUp(alpha=0.7, num_classes=3)(images, labels)
    mix = Mixup(lam=float(targets[0, 0]), box=None)
    assert torch.allclose(mix_images(mix, images), expected, atol=1e-6)
    assert torch.allclose(mix_labels(mix, labels, 3), targets, atol=1e-6)


def test_cutmix_of_a_pair_is_that_of_torchvision() -> None:
    from torchvision.transforms import v2

    images, labels = torch.stack([torch.zeros(3, 16, 16), torch.ones(3, 16, 16)]), torch.tensor([0, 2])
    torch.manual_seed(3)
    expected, targets = v2.CutMix(alpha=1.0, num_classes=3)(images, labels)
    rows, columns = expected[0, 0].nonzero().T
    box = (int(rows.min()), int(rows.max()) + 1, int(columns.min()), int(columns.max()) + 1)
    mix = Mixup(lam=1 - len(rows) / 256, box=box)
    assert torch.equal(mix_images(mix, images), expected)
    assert torch.allclose(mix_labels(mix, labels, 3), targets, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 7, 8])
@pytest.mark.parametrize("settings", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
def test_the_label_has_the_mass_of_what_is_in_the_image(count: int, settings: dict[str, float]) -> None:
    config = TrainConfig(data="x", **settings)  # type: ignore[arg-type]
    # Image i is all i, and of class i: what it consists of can be read off.
    images = torch.arange(count).float()[:, None, None, None].expand(count, 3, 16, 16)
    for step in range(20):
        mix = draw_mix(config, step, 16)
        assert mix is not None
        targets = mix_labels(mix, torch.arange(count), count)
        assert torch.allclose(targets.sum(1), torch.ones(count))
        mixed = mix_images(mix, images)
        assert torch.allclose(mixed.mean((1, 2, 3)), targets @ torch.arange(count).float(), atol=1e-5)
        assert all(set(row.nonzero().flatten().tolist()) <= {n, n ^ 1} for n, row in enumerate(targets))


def test_each_step_mixes_differently_and_the_same_step_identically() -> None:
    config = TrainConfig(data="x", mixup=0.4, cutmix=1.0)
    mixes = [draw_mix(config, step, 32) for step in range(400)]
    assert mixes == [draw_mix(config, step, 32) for step in range(400)]
    assert all(one != other for one, other in pairwise(mixes))
    assert 150 < sum(mix is not None and mix.box is None for mix in mixes) < 250
    assert all(mix is not None and 0 <= mix.lam <= 1 for mix in mixes)
    assert draw_mix(TrainConfig(data="x"), 0, 32) is None
