"""Training loops as people write them, to be measured side by side: ours, one by hand, and those of two libraries.

Each is an endless iterator that makes one training step when it is asked for the next, so that loops can take turns.
All train the same model from torchvision with SGD or AdamW. They differ in what a step does besides:

- `ours`: `training.engine.trainer.Trainer.steps`, with everything: DDP, metrics, requests to stop, heartbeats.
- `hand-written`: a forward pass, a backward pass and the optimizer, as fast as plain torch goes. No metrics.
- `torchvision`: in the style of its references: loss and accuracies are read from the device in every step.
- `timm`: its own loader, optimizer and schedule; the loss is read from the device every 50 steps.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision import datasets, models
from torchvision.transforms import v2

from hpc.core.nodedir import NodeDir
from hpc.core.rundir import RunDir
from training.config.train_config import TrainConfig
from training.engine.launch import make_trainer
from training.engine.trainer import Trainer
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext

Batches = Iterator[tuple[Tensor, Tensor]]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_LR, _MOMENTUM, _WEIGHT_DECAY = 1e-4, 0.9, 5e-4


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, on which images."""

    model: str
    """Of torchvision."""
    image_size: int
    batch_size: int
    """Of this rank."""
    folder: Path | None = None
    """Class directories of JPEGs; None: one batch that lies on the device."""
    packed: Path | None = None
    """The same, packed: only ours reads it."""
    amp: Literal["none", "bf16"] = "bf16"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    workers: int = 0
    classes: int = 1000


@dataclass(kw_only=True)
class Loop:
    """One loop, and what was measured of it."""

    name: str
    steps: Iterator[None]
    seconds_per_step: float = 0.0
    """The last time that it was measured."""
    speeds: list[float] = field(default_factory=list)
    """Images per second, by measurement."""
    memory_bytes: int = 0
    """The peak that this loop's tensors took of the GPU."""


def ours(case: Case, group: ProcessGroup, run_dir: Path) -> Iterator[None]:
    """Steps of this trainer, on generated images, JPEGs or packed images."""
    trainer = our_trainer(case, group, run_dir)
    trainer.stepper.warm_up(trainer.data.channels, trainer.data.size)
    trainer.resume()
    return trainer.steps()


def our_trainer(
    case: Case, group: ProcessGroup, run_dir: Path, node_dir: NodeDir | None = None, **flags: Any
) -> Trainer:
    """This trainer, with other flags if they are given."""
    source = case.packed or case.folder
    config = TrainConfig(
        synthetic=source is None, data=str(source or ""), data_on_device="off" if source else "on",
        model=case.model, image_size=case.image_size, batch_size=case.batch_size * group.world_size, amp=case.amp,
        optimizer=case.optimizer, lr=_LR, weight_decay=_WEIGHT_DECAY, epochs=10**6, val_split=0.0,
        num_workers=case.workers if source else 0, **flags,
    )  # fmt: skip
    context = RunContext(config=config, run_dir=RunDir(run_dir), attempt=1, started=time.monotonic(), node_dir=node_dir)
    return make_trainer(context, group)


def hand_written(case: Case, device: torch.device) -> Iterator[None]:
    """The loop of tutorials at its fastest."""
    model = _model(case, device)
    optimizer = _optimizer(case, model)
    for images, labels in _batches(case, device):
        _step(case, model, optimizer, images, labels)
        yield


def torchvision_style(case: Case, device: torch.device) -> Iterator[None]:
    """The same, with the metrics of torchvision's references."""
    model = _model(case, device)
    optimizer = _optimizer(case, model)
    shown: list[tuple[float, float, float]] = []
    for images, labels in _batches(case, device):
        loss, logits = _step(case, model, optimizer, images, labels)
        with torch.inference_mode():
            hits = logits.topk(5, 1).indices.eq(labels[:, None])
            shown.append((loss.item(), hits[:, :1].sum().item(), hits.sum().item()))
        yield


def timm_style(case: Case, device: torch.device) -> Iterator[None]:
    """Timm's loader, optimizer and schedule, with a loop like its training script's."""
    from timm import data, optim, scheduler  # noqa: PLC0415  # an extra

    model = _model(case, device)
    optimizer = optim.create_optimizer_v2(model, opt=case.optimizer, lr=_LR, weight_decay=_WEIGHT_DECAY)
    schedule = scheduler.CosineLRScheduler(optimizer, t_initial=10**6, t_in_epochs=False)
    batches = _fixed(case, device)
    if case.folder:
        dataset = data.create_dataset("", str(case.folder))
        loader = data.create_loader(
            dataset, (3, case.image_size, case.image_size), case.batch_size, is_training=True, device=device,
            num_workers=case.workers, interpolation="bilinear", persistent_workers=case.workers > 0,
        )  # fmt: skip
        batches = _endless(loader, device)
    shown: list[float] = []
    for step, (images, labels) in enumerate(batches):
        loss, _ = _step(case, model, optimizer, images, labels)
        schedule.step_update(step)
        if step % 50 == 0:
            shown.append(loss.item())
        yield


RIVALS: dict[str, Callable[[Case, torch.device], Iterator[None]]] = {
    "hand-written": hand_written,
    "torchvision": torchvision_style,
    "timm": timm_style,
}


def _model(case: Case, device: torch.device) -> nn.Module:
    arguments: dict[str, Any] = {"image_size": case.image_size} if case.model.startswith("vit_") else {}
    model: nn.Module = models.get_model(case.model, weights=None, num_classes=case.classes, **arguments)
    return model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload,no-any-return]


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=_WEIGHT_DECAY)
    return torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM, weight_decay=_WEIGHT_DECAY)


def _step(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.autocast(images.device.type, torch.bfloat16, enabled=case.amp == "bf16"):
        logits = model(images)
        loss = functional.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach(), logits.detach()


def _batches(case: Case, device: torch.device) -> Batches:
    if case.folder is None:
        return _fixed(case, device)
    steps = [v2.RandomResizedCrop(case.image_size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    dataset = datasets.ImageFolder(
        str(case.folder), v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    )
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        dataset, batch_size=case.batch_size, shuffle=True, drop_last=True, num_workers=case.workers,
        pin_memory=device.type == "cuda", persistent_workers=case.workers > 0,
    )  # fmt: skip
    return _endless(loader, device)


def _fixed(case: Case, device: torch.device) -> Batches:
    images = torch.randn(case.batch_size, 3, case.image_size, case.image_size, device=device)
    images = images.to(memory_format=torch.channels_last)
    return itertools.repeat((images, torch.randint(0, case.classes, (case.batch_size,), device=device)))


def _endless(loader: Any, device: torch.device) -> Batches:
    while True:
        for images, labels in loader:
            moved = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            yield moved, labels.to(device, non_blocking=True)
