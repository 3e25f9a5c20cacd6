"""The training loops of Lightning and Accelerate, as their documentation shows them, for `benchmarks/speed`.

Both wrap the model in DDP and give each rank its share of the data by themselves. What costs time and is not asked for
is turned off in Lightning: progress bar, model summary, checkpoints, logger. Runs on every rank, in an environment with
the dependency group `rivals`; imports a library where its loop begins, because the other one does without.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.speed.loops import Case, endless, fixed_batches, make_dataset, make_loader, make_model, make_optimizer

CPU = torch.device("cpu")


def accelerate_style(case: Case, device: torch.device) -> Iterator[None]:
    """Make a step with Accelerate whenever the next one is asked for."""
    from accelerate import Accelerator  # type: ignore[import-not-found]  # noqa: PLC0415  # see the module

    accelerator = Accelerator(cpu=True)
    model = make_model(case, device)
    model, optimizer = accelerator.prepare(model, make_optimizer(case, model))
    batches = fixed_batches(case, device)
    if case.folder:
        loader = make_loader(case, make_dataset(case.folder, case.image_size), device)
        batches = endless(accelerator.prepare(loader), device)
    for images, labels in batches:
        optimizer.zero_grad()
        logits = model(images.to(memory_format=torch.channels_last))
        accelerator.backward(functional.cross_entropy(logits, labels))
        optimizer.step()
        yield


def fit_with_lightning(case: Case, ranks: int, step_done: Callable[[], None]) -> None:
    """Train with Lightning's Trainer, which calls `step_done` after each step, for ever."""
    from lightning import (  # noqa: PLC0415  # see the module
        Callback,
        LightningModule,
        Trainer,
    )

    class Classifier(LightningModule):  # type: ignore[misc]  # Lightning is not in the dev environment
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(case, CPU)

        def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
            images, labels = batch
            loss = functional.cross_entropy(self.model(images.to(memory_format=torch.channels_last)), labels)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(case, self.model)

    class Report(Callback):  # type: ignore[misc]  # likewise
        def on_train_batch_end(self, *_: Any) -> None:
            step_done()

    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=-1, callbacks=[Report()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches: Any = fixed_batches(case, CPU)
    if case.folder:
        batches = make_loader(case, make_dataset(case.folder, case.image_size), CPU)
    trainer.fit(Classifier(), batches)
