"""How flags change a step and an evaluation, seen from inside the model."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainings import children, load, trainer_with
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from training.config.train_config import TrainConfig
from training.data.loader import Batch
from training.data.transforms.mixup import draw_mix, mix_images, mix_labels
from training.engine.loss_meter import LossMeter
from training.engine.shared_data import loader_workers
from training.engine.trainer import Trainer
from training.runtime.process_group import ProcessGroup


@contextmanager
def watched(module: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The input and the output of a module in each forward pass."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = module.register_forward_hook(lambda _, args, output: seen.append((args[0].detach(), output.detach())))
    yield seen
    hook.remove()


def make_step(trainer: Trainer, group: ProcessGroup) -> tuple[Batch, float, float]:
    """A step: its batch, its loss and its accuracy."""
    batch, loss_meter = (
        trainer.data.train[next(trainer.schedule.requests(trainer.state.progress.epoch, 0, 0, 1))],
        LossMeter(group),
    )
    trainer.stepper.step(batch, loss_meter)
    means = loss_meter.totals(1).means()
    assert means is not None
    return batch, means.loss, means.accuracy


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mixup": 0.4, "label_smoothing": 0.1},
        {"mixup": 0.4, "cutmix": 1.0, "label_smoothing": 0.1, "seed": 3},
    ],
)
def test_loss_and_accuracy_are_those_of_the_mixed_images_and_the_smoothed_labels(
    group: ProcessGroup, idx_data: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    trainer = trainer_with(group, idx_data, tmp_path / "run", **settings)
    with watched(trainer.state.model) as seen:
        batch, loss, accuracy = make_step(trainer, group)
    [(images, logits)] = seen
    plain, labels = trainer.stepper.preprocess(batch.images), nn.functional.one_hot(batch.labels, 3).float()
    mix = draw_mix(trainer.config, 0, 12)
    assert (mix is not None) == ("mixup" in settings or "cutmix" in settings)
    assert torch.equal(images, mix_images(mix, plain) if mix else plain)
    targets = mix_labels(mix, batch.labels, 3) if mix else labels
    smoothing = settings.get("label_smoothing", 0.0)
    smooth = (1 - smoothing) * targets + smoothing / 3
    assert loss == pytest.approx(float(-(smooth * logits.log_softmax(1)).sum(1).mean()), rel=1e-5)
    assert accuracy == float((logits.argmax(1) == targets.argmax(1)).double().mean())


@pytest.mark.parametrize(("amp", "dtype"), [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_computes_in_it_and_keeps_weights_whole(
    group: ProcessGroup, idx_data: Path, tmp_path: Path, amp: str, dtype: torch.dtype
) -> None:
    trainer = trainer_with(group, idx_data, tmp_path / "run", amp=amp)
    convolution = next(module for module in trainer.state.model.modules() if isinstance(module, nn.Conv2d))
    with watched(convolution) as seen:
        make_step(trainer, group)
        assert trainer.data.val is not None
        trainer.validator.evaluator.evaluate(trainer.data.val, lambda: None)
    assert [output.dtype for _, output in seen] == [dtype, dtype]
    moments = [values for state in trainer.state.optimizer.state.values() for values in state.values()]
    values = [*trainer.state.model.parameters(), *moments]
    assert {value.dtype for value in values if torch.is_tensor(value)} == {torch.float32}


def test_images_grow_with_the_epochs_and_evaluations_have_the_last_size(
    group: ProcessGroup, folder_data: Path, idx_data: Path, tmp_path: Path
) -> None:
    for data, mixup in ((idx_data, 0.0), (folder_data, 0.3)):
        settings = {"model": "resnet20", "image_size": 24, "initial_image_size": 12, "epochs": 10, "mixup": mixup}
        trainer = trainer_with(group, data, tmp_path / data.name, **settings)
        sides = []
        for epoch in range(10):
            trainer.state.progress.epoch = epoch
            with watched(trainer.state.model) as seen:
                make_step(trainer, group)
            sides += [images.shape[-1] for images, _ in seen]
        assert sides == [12, 12, 16, 16, 20, 20, 20, 20, 24, 24]
        with watched(trainer.state.model) as seen:
            assert trainer.data.test is not None
            trainer.validator.evaluator.evaluate(trainer.data.test, lambda: None)
        assert {images.shape[-1] for images, _ in seen} == {24}


def test_a_step_has_grad_accum_steps_micro_batches(group: ProcessGroup, idx_data: Path, tmp_path: Path) -> None:
    trainer = trainer_with(group, idx_data, tmp_path / "run", grad_accum_steps=3)
    with watched(trainer.state.model) as seen:
        make_step(trainer, group)
    assert [len(images) for images, _ in seen] == [6, 7, 7]


def test_a_rank_has_num_workers_loader_workers(
    group: ProcessGroup, idx_data: Path, folder_data: Path, tmp_path: Path
) -> None:
    asked = [
        trainer_with(group, folder_data, tmp_path / f"{workers}", num_workers=workers).workers for workers in (0, 3)
    ]
    assert asked == [0, 3]
    assert trainer_with(group, folder_data, tmp_path / "folder").workers >= 1
    assert trainer_with(group, idx_data, tmp_path / "idx").workers == 0, "they cost nothing to make"


def test_an_evaluation_starts_no_more_workers_than_it_has_batches(
    group: ProcessGroup, folder_data: Path, tmp_path: Path
) -> None:
    trainer, before, started = trainer_with(group, folder_data, tmp_path, num_workers=3), children(os.getpid()), []
    assert trainer.data.val is not None
    evaluator = trainer.validator.evaluator
    evaluator.evaluate(trainer.data.val, lambda: started.append(len(children(os.getpid())) - len(before)))
    assert started == [2, 2], "27 images are two batches of up to 20"


def test_a_rank_has_a_loader_worker_for_each_of_its_cores(group: ProcessGroup, folder_data: Path) -> None:
    data, config = load(folder_data), TrainConfig(data=str(folder_data))
    assert loader_workers(config, data, replace(group, cores=12)) == 12
    assert loader_workers(config, data, replace(group, cores=128)) == 32, "more take memory, and no GPU needs them"


# What on a GPU makes the host wait for it: numbers and shapes that only the device knows.
WAITING = {
    *("_local_scalar_dense", "is_nonzero", "nonzero", "equal"),
    *("masked_select", "bincount", "_unique2", "unique_dim"),
}


class Operations(TorchDispatchMode):
    """Collects the names of the operations that torch calls, and where it calls those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.waits: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names.add(name)
        if name in WAITING:
            self.waits.add(
                name + " in " + " < ".join(frame.name for frame in reversed(traceback.extract_stack()[-9:-1]))
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ema_decay": 0.9, "clip_grad_norm": 1.0, "mixup": 0.2, "cutmix": 1.0, "label_smoothing": 0.1},
        {"grad_accum_steps": 3, "amp": "bf16", "model": "resnet20"},
    ],
)
def test_no_step_waits_for_its_device(
    group: ProcessGroup, idx_data: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    trainer = trainer_with(group, idx_data, tmp_path, **settings)
    requests = trainer.schedule.requests(0, 0, 0, 1)
    batches = [trainer.data.train[next(requests)] for _ in range(3)]
    with Operations() as operations:
        for batch in batches:
            trainer.stepper.step(batch, trainer.loss_meter)
            totals = trainer.loss_meter.totals(trainer.state.progress.step)
            trainer.loss_meter.restart()
        # What a snapshot takes from the device.
        for part in ("model", "optimizer", "scaler", "loss_meter"):
            trainer.state._parts[part].state_dict()  # noqa: SLF001
    assert {"convolution_backward", "mul_"} <= operations.names, "it sees what a step does"
    assert not operations.waits
    assert totals.means() is not None
