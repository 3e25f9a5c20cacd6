"""Exact evaluation: every sample counts once, and the result is bit-identical for any number of ranks.

Runs on every rank. The batches do not depend on the number of ranks. The ranks exchange counts, the loss of each batch
and the prediction of each image, never averages; the total must be the size of the data set.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.config.train_config import TrainConfig
from training.data.batch_schedule import evaluation_requests
from training.data.loader import Batch, ImageSource, load_device_batches
from training.models.factory import autocast
from training.models.parallel import load_full_state_dict
from training.runtime.process_group import ProcessGroup

_BATCH = 256
_TOP_K = 5


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, the same on every rank."""

    loss: float
    confusion: Tensor
    """int64 [classes, classes]: images by true class (row) and predicted class (column)."""
    corrupt: tuple[int, ...]
    """Indices of images that cannot be read; other images replaced them."""
    predicted: Tensor
    """int64 [n]: predicted class of each image."""
    probability: Tensor
    """float32 [n]: probability of the predicted class."""
    top5_correct: int
    """Images whose true class is among the five most likely."""

    @property
    def correct(self) -> int:
        """Number of images predicted correctly."""
        return int(self.confusion.trace())

    @property
    def total(self) -> int:
        """Number of images."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy, 0 to 1."""
        return self.correct / self.total

    @property
    def top5_accuracy(self) -> float:
        """Top-5 accuracy, 0 to 1."""
        return self.top5_correct / self.total


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates one model."""

    config: TrainConfig
    model: nn.Module
    preprocess: Callable[[Tensor], Tensor]
    """Turns the images of a batch (uint8 [n, c, h, w]) into what the model takes."""
    group: ProcessGroup
    classes: int
    workers: int

    def evaluate(self, source: ImageSource, before_batch: Callable[[], object]) -> Evaluation:
        """Evaluate on all of `source`; call `before_batch` before every batch, equally often on every rank."""
        # All ranks evaluate rank 0's batch statistics: between steps each rank has its own.
        for buffer in self.model.buffers():
            torch.distributed.broadcast(buffer, 0)
        self.model.eval()
        rank, world_size, device = self.group.rank, self.group.world_size, self.group.device
        losses = torch.zeros(-(-len(source) // _BATCH), dtype=torch.float64, device=device)
        confusion = torch.zeros(self.classes**2, dtype=torch.int64, device=device)
        predicted = torch.zeros(len(source), dtype=torch.int64, device=device)
        probability = torch.zeros(len(source), dtype=torch.float32, device=device)
        top5_correct = torch.zeros((), dtype=torch.int64, device=device)
        corrupt: set[int] = set()
        requests = evaluation_requests(len(source), _BATCH, rank, world_size)
        with load_device_batches(device, source, requests, self.workers) as batches:
            for number, batch in enumerate(batches):
                before_batch()
                if len(batch.labels):
                    indices = batch.indices.to(device, non_blocking=True)
                    results = self._evaluate_batch(batch, confusion, top5_correct)
                    losses[number * world_size + rank], predicted[indices], probability[indices] = results
                    corrupt.update(batch.corrupt.tolist())
                elif self.config.strategy == "fsdp":
                    # Other ranks need this rank's shard of the model for their forward pass.
                    with torch.inference_mode():
                        self.model(self.preprocess(batch.images.new_zeros(1, *batch.images.shape[1:])))
        all_reduce = self.group.all_reduce
        result = Evaluation(
            confusion=all_reduce(confusion).reshape(self.classes, self.classes),
            # Of each batch's loss and each image's prediction one rank has the value and the others zero: no rounding.
            loss=math.fsum(all_reduce(losses).tolist()) / len(source),
            corrupt=tuple(sorted(set().union(*self.group.all_gather_json(list(corrupt))))),
            predicted=all_reduce(predicted),
            probability=all_reduce(probability),
            top5_correct=int(all_reduce(top5_correct)),
        )
        if result.total != len(source):
            raise AssertionError(f"{result.total} of {len(source)} samples were counted")
        return result

    def evaluate_weights(
        self, weights: Iterable[tuple[str, Tensor]], source: ImageSource, before_batch: Callable[[], object]
    ) -> Evaluation:
        """Evaluate other weights, which come one after the other; afterwards the model has its own again."""
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        load_full_state_dict(self.model, weights, sharded=self.config.strategy == "fsdp")
        try:
            return self.evaluate(source, before_batch)
        finally:
            load_full_state_dict(self.model, own.items(), sharded=False)

    @torch.inference_mode()
    def _evaluate_batch(self, batch: Batch, confusion: Tensor, top5_correct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add a batch to the counts, and return its loss, the predicted classes and their probabilities."""
        labels = batch.labels.to(self.group.device, non_blocking=True)
        with autocast(self.config, self.group.device):
            logits = self.model(self.preprocess(batch.images)).float()
        predicted = logits.argmax(1)
        confusion += torch.bincount(labels * self.classes + predicted, minlength=self.classes**2)
        more_likely = (logits > logits.gather(1, labels[:, None])).sum(1)
        top5_correct += (more_likely < _TOP_K).sum()
        return functional.cross_entropy(logits, labels, reduction="sum"), predicted, logits.softmax(1).amax(1)
