"""Exact evaluation: every sample counts once, whatever the number of ranks. Runs on every rank.

Ranks add up whole numbers and sums, never averages of averages, and the total must be the size of the data set.
"""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.config import TrainConfig
from training.data import Source, load_ahead
from training.distributed import Ranks
from training.model import Preprocess
from training.optim import autocast
from training.plan import evaluation_requests

_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, the same on every rank."""

    loss: float
    confusion: Tensor
    """int64 [classes, classes]: images of the class of the row that were taken for that of the column."""

    @property
    def correct(self) -> int:
        """Images whose class was recognised."""
        return int(self.confusion.trace())

    @property
    def total(self) -> int:
        """Images."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """From 0 to 1."""
        return self.correct / self.total


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates one model."""

    config: TrainConfig
    model: nn.Module
    preprocess: Preprocess
    ranks: Ranks
    classes: int
    workers: int

    def evaluate(self, source: Source, before_batch: Callable[[], object]) -> Evaluation:
        """Evaluate on all of `source`.

        Args:
            source: the samples.
            before_batch: is called before every batch, the same number of times on every rank; what it raises ends
                the evaluation.
        """
        self._share_buffers()
        self.model.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        confusion = torch.zeros(self.classes**2, dtype=torch.int64, device=self.ranks.device)
        requests = evaluation_requests(len(source), _BATCH, self.ranks.rank, self.ranks.world_size)
        pinned = self.ranks.device.type == "cuda"
        with load_ahead(source, requests, self.workers, pin_memory=pinned) as batches:
            for images, labels in batches:
                before_batch()
                if len(labels):
                    self._count(images, labels.to(self.ranks.device, non_blocking=True), loss, confusion)
        return self._summed(loss, confusion, len(source))

    @torch.inference_mode()
    def _count(self, images: Tensor, labels: Tensor, loss: Tensor, confusion: Tensor) -> None:
        with autocast(self.config, self.ranks.device):
            logits = self.model(self.preprocess(images))
        loss += functional.cross_entropy(logits.float(), labels, reduction="sum")
        confusion += torch.bincount(labels * self.classes + logits.argmax(1), minlength=self.classes**2)

    def _share_buffers(self) -> None:
        """All ranks evaluate rank 0's batch statistics; between steps, each rank's are its own."""
        for buffer in self.model.buffers():
            torch.distributed.broadcast(buffer, 0)

    def _summed(self, loss: Tensor, confusion: Tensor, samples: int) -> Evaluation:
        counts = self.ranks.sum(confusion).reshape(self.classes, self.classes)
        result = Evaluation(loss=float(self.ranks.sum(loss)) / samples, confusion=counts)
        if result.total != samples:
            raise AssertionError(f"{result.total} of {samples} samples were counted")
        return result


def confusion_csv(confusion: Tensor, classes: tuple[str, ...]) -> str:
    """The confusion matrix with the names of the classes: a row for each true class, a column for each answer."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["true class", *classes])
    writer.writerows([name, *row] for name, row in zip(classes, confusion.tolist(), strict=True))
    return text.getvalue()
