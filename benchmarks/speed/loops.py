"""Training loops as people write them, to be measured side by side: ours, one by hand, and those of two libraries.

Each is an endless iterator that makes one training step when it is asked for the next, so that loops can take turns.
All train the same model with SGD or AdamW, in DDP where there are several ranks. They differ in what a step does
besides:

- ours (`our_loop.py`) does everything: DDP, metrics, requests to stop, heartbeats.
- `hand-written`: a forward pass, a backward pass and the optimizer, as fast as plain torch goes. No metrics.
- `torchvision`: in the style of its references: loss and accuracies are read from the device in every step.
- `timm`: its own loader, optimizer and schedule; the loss is read from the device every 50 steps.

torchvision is imported where it is needed: a loop is charged for its imports in `benchmarks/speed`.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SMALL_CNN = "small-cnn"
Batches = Iterator[tuple[Tensor, Tensor]]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LR, WEIGHT_DECAY = 1e-4, 5e-4
_MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, on which images."""

    model: str
    """The name of torchvision's model, or this trainer's small-cnn."""
    image_size: int
    batch_size: int
    """Images in a batch of this rank."""
    folder: str = ""
    """Class directories of JPEGs; empty: one batch that lies on the device."""
    packed: str = ""
    """The same, packed: only ours reads it."""
    amp: Literal["none", "bf16"] = "bf16"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    workers: int = 0
    classes: int = 1000


def hand_written(case: Case, device: torch.device) -> Iterator[None]:
    """Train as tutorials do, at their fastest."""
    model = _in_ddp(make_model(case, device), gradient_as_bucket_view=True)
    optimizer = make_optimizer(case, model)
    for images, labels in _batches(case, device):
        _step(case, model, optimizer, images, labels)
        yield


def torchvision_style(case: Case, device: torch.device) -> Iterator[None]:
    """Do the same with the metrics of torchvision's references."""
    model = _in_ddp(make_model(case, device))
    optimizer = make_optimizer(case, model)
    shown: list[tuple[float, float, float]] = []
    for images, labels in _batches(case, device):
        loss, logits = _step(case, model, optimizer, images, labels)
        with torch.inference_mode():
            hits = logits.topk(5, 1).indices.eq(labels[:, None])
            shown.append((loss.item(), hits[:, :1].sum().item(), hits.sum().item()))
        yield


def timm_style(case: Case, device: torch.device) -> Iterator[None]:
    """Train with timm's loader, optimizer and schedule, in a loop like its training script's."""
    from timm import data, optim, scheduler  # noqa: PLC0415  # an extra

    model = _in_ddp(make_model(case, device))
    optimizer = optim.create_optimizer_v2(model, opt=case.optimizer, lr=LR, weight_decay=WEIGHT_DECAY)
    schedule = scheduler.CosineLRScheduler(optimizer, t_initial=10**6, t_in_epochs=False)
    batches = fixed_batches(case, device)
    if case.folder:
        # No color jitter, which would be timm's default: the others have none.
        dataset = data.create_dataset("", case.folder)
        loader = data.create_loader(
            dataset, (3, case.image_size, case.image_size), case.batch_size, is_training=True, device=device,
            num_workers=case.workers, interpolation="bilinear", persistent_workers=case.workers > 0,
            color_jitter=0.0, distributed=ranks() > 1,
        )  # fmt: skip
        batches = endless(loader, device)
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


def ranks() -> int:
    """Return how many ranks there are."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def make_model(case: Case, device: torch.device) -> nn.Module:
    """Make the model, on the device, without DDP."""
    if case.model == SMALL_CNN:
        from training.models.factory import small_cnn  # noqa: PLC0415  # only where it is trained

        model: nn.Module = small_cnn(case.classes, 3, case.image_size)
    else:
        from torchvision import models  # noqa: PLC0415  # see above

        arguments: dict[str, Any] = {"image_size": case.image_size} if case.model.startswith("vit_") else {}
        model = models.get_model(case.model, weights=None, num_classes=case.classes, **arguments)
    return model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload,no-any-return]


def _in_ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options) if ranks() > 1 else model


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Make SGD or AdamW for all parameters alike."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=_MOMENTUM, weight_decay=WEIGHT_DECAY)


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
    if not case.folder:
        return fixed_batches(case, device)
    dataset = make_dataset(case.folder, case.image_size)
    sampler: DistributedSampler[Any] | None = DistributedSampler(dataset) if ranks() > 1 else None
    return endless(make_loader(case, dataset, device, sampler), device)


def make_dataset(folder: str, image_size: int) -> Dataset[Any]:
    """Make an ImageFolder with the augmentation of tutorials, in torchvision's transforms of version 2."""
    from torchvision import datasets  # noqa: PLC0415  # see above
    from torchvision.transforms import v2  # noqa: PLC0415  # see above

    steps = [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    dataset: Dataset[Any] = datasets.ImageFolder(
        folder, v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    )
    return dataset


def make_loader(
    case: Case, dataset: Dataset[Any], device: torch.device, sampler: DistributedSampler[Any] | None = None
) -> DataLoader[Any]:
    """Make torch's loader, as tutorials set it up. Without a sampler it shuffles for one rank."""
    return DataLoader(
        dataset, batch_size=case.batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True,
        num_workers=case.workers, pin_memory=device.type == "cuda", persistent_workers=case.workers > 0,
    )  # fmt: skip


def fixed_batches(case: Case, device: torch.device) -> Batches:
    """Return one batch that lies on the device, again and again."""
    images = torch.randn(case.batch_size, 3, case.image_size, case.image_size, device=device)
    images = images.to(memory_format=torch.channels_last)
    return itertools.repeat((images, torch.randint(0, case.classes, (case.batch_size,), device=device)))


def endless(loader: Any, device: torch.device) -> Batches:
    """Return the batches of a loader on the device, epoch after epoch."""
    for epoch in itertools.count():
        if isinstance(sampler := getattr(loader, "sampler", None), DistributedSampler):
            sampler.set_epoch(epoch)
        for images, labels in loader:
            moved = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            yield moved, labels.to(device, non_blocking=True)
