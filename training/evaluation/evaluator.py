"""Exact evaluation: every sample counts once, and the result is the same to the last digit for any number of ranks.

Runs on every rank. The batches are the same whoever evaluates them, the ranks exchange whole numbers, each batch's loss
and each image's probability, never averages, and the total must be the size of the data set.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.config.train_config import TrainConfig
from training.data.batch_schedule import evaluation_requests
from training.data.dataset import Batch, ImageSource, load_device_batches
from training.models.factory import Preprocess
from training.models.parallel import load_full_state_dict
from training.models.precision import autocast
from training.runtime.process_group import ProcessGroup

_BATCH = 256
_BEST = 5


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, the same on every rank."""

    loss: float
    confusion: Tensor
    """int64 [classes, classes]: images of the class of the row that were taken for that of the column."""
    corrupt: tuple[int, ...]
    """Places of the images that could not be read; others took their place."""
    predicted: Tensor
    """int64 [n]: the class that each image was taken for."""
    probability: Tensor
    """float32 [n]: that the model gave to this class."""
    among_best: int
    """Images whose class was among the five that the model found the likeliest."""

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

    @property
    def top5_accuracy(self) -> float:
        """The share of the images whose class was among the five likeliest, from 0 to 1."""
        return self.among_best / self.total


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates one model."""

    config: TrainConfig
    model: nn.Module
    preprocess: Preprocess
    group: ProcessGroup
    classes: int
    workers: int

    def evaluate(self, source: ImageSource, before_batch: Callable[[], object]) -> Evaluation:
        """Evaluate on all of `source`.

        Args:
            source: the samples.
            before_batch: is called before every batch, the same number of times on every rank; what it raises ends
                the evaluation.
        """
        self._share_buffers()
        self.model.eval()
        rank, world_size, device = self.group.rank, self.group.world_size, self.group.device
        losses = torch.zeros(-(-len(source) // _BATCH), dtype=torch.float64, device=device)
        confusion = torch.zeros(self.classes**2, dtype=torch.int64, device=device)
        predicted = torch.zeros(len(source), dtype=torch.int64, device=device)
        probability = torch.zeros(len(source), dtype=torch.float32, device=device)
        among_best = torch.zeros((), dtype=torch.int64, device=device)
        corrupt: set[int] = set()
        requests = evaluation_requests(len(source), _BATCH, rank, world_size)
        with load_device_batches(device, source, requests, self.workers) as batches:
            for turn, batch in enumerate(batches):
                before_batch()
                if len(batch.labels):
                    places = batch.indices.to(device, non_blocking=True)
                    answers = self._count(batch, confusion, among_best)
                    losses[turn * world_size + rank], predicted[places], probability[places] = answers
                    corrupt.update(batch.corrupt.tolist())
                elif self.config.strategy == "fsdp":
                    self._keep_company(batch)
        return self._summed(losses, confusion, corrupt, (predicted, probability, among_best))

    def evaluate_other(
        self, weights: Mapping[str, Tensor], source: ImageSource, before_batch: Callable[[], object]
    ) -> Evaluation:
        """As `evaluate`, with other weights, which the model has for that long."""
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        load_full_state_dict(self.model, weights, sharded=self.config.strategy == "fsdp")
        try:
            return self.evaluate(source, before_batch)
        finally:
            self.model.load_state_dict(own)

    @torch.inference_mode()
    def _count(self, batch: Batch, confusion: Tensor, among_best: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add a batch to the counts, and return its loss, and for each image the class and its probability."""
        labels = batch.labels.to(self.group.device, non_blocking=True)
        with autocast(self.config, self.group.device):
            logits = self.model(self.preprocess(batch.images)).float()
        predicted = logits.argmax(1)
        confusion += torch.bincount(labels * self.classes + predicted, minlength=self.classes**2)
        likelier = (logits > logits.gather(1, labels[:, None])).sum(1)
        among_best += (likelier < _BEST).sum()
        return functional.cross_entropy(logits, labels, reduction="sum"), predicted, logits.softmax(1).amax(1)

    @torch.inference_mode()
    def _keep_company(self, batch: Batch) -> None:
        """Make a pass with nothing to evaluate: the others need this rank's part of the model for theirs."""
        self.model(self.preprocess(batch.images.new_zeros(1, *batch.images.shape[1:])))

    def _share_buffers(self) -> None:
        """All ranks evaluate rank 0's batch statistics; between steps, each rank's are its own."""
        for buffer in self.model.buffers():
            torch.distributed.broadcast(buffer, 0)

    def _summed(
        self, losses: Tensor, confusion: Tensor, corrupt: set[int], answers: tuple[Tensor, Tensor, Tensor]
    ) -> Evaluation:
        samples = len(answers[0])
        counts = self.group.all_reduce(confusion).reshape(self.classes, self.classes)
        # Each batch's loss and each image's answer come from one rank and zeros from the others: nothing is rounded.
        loss = math.fsum(self.group.all_reduce(losses).tolist()) / samples
        everybodys = sorted(set().union(*self.group.all_gather_object(corrupt)))
        predicted, probability, among_best = map(self.group.all_reduce, answers)
        result = Evaluation(
            loss=loss,
            confusion=counts,
            corrupt=tuple(everybodys),
            predicted=predicted,
            probability=probability,
            among_best=int(among_best),
        )
        if result.total != samples:
            raise AssertionError(f"{result.total} of {samples} samples were counted")
        return result
