"""Evaluates a model exactly: each image counts once, and the result has the same bits for any number of ranks.

Runs on every rank. The batches do not depend on the number of ranks. The ranks exchange no averages, only counts, the
loss of each batch and the prediction of each image. They check that each image was evaluated once.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.config.train_config import TrainConfig
from training.data.batch_schedule import evaluation_requests
from training.data.loader import ImageSource, load_device_batches
from training.models.factory import Preprocess, autocast
from training.models.parallel import load_full_state_dict
from training.runtime.process_group import ProcessGroup

_MAX_BATCH = 256
_TOP_K = 5


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, the same on every rank."""

    loss: float
    labels: Tensor
    """True class of each evaluated image, int64 [n]."""
    corrupt: tuple[int, ...]
    """Indices of unreadable images, in whose place other images were evaluated."""
    predicted: Tensor
    """Predicted class of each image, int64 [n]."""
    top5_correct: int
    """Number of images whose true class is among the five most likely classes."""

    @property
    def correct(self) -> int:
        """Number of images predicted correctly."""
        return int((self.predicted == self.labels).sum())

    @property
    def total(self) -> int:
        """Number of images."""
        return len(self.labels)

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy, from 0 to 1."""
        return self.correct / self.total

    @property
    def top5_accuracy(self) -> float:
        """Top-5 accuracy, from 0 to 1."""
        return self.top5_correct / self.total


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a model on all ranks."""

    config: TrainConfig
    model: nn.Module
    preprocess: Preprocess
    group: ProcessGroup
    workers: int

    def evaluate(self, source: ImageSource, before_batch: Callable[[], object]) -> Evaluation:
        """Evaluate on all of `source`. `before_batch` is called before each batch, equally often on all ranks."""
        # All ranks evaluate with rank 0's batch statistics; in training each rank has its own.
        for buffer in self.model.buffers():
            torch.distributed.broadcast(buffer, 0)
        self.model.eval()
        rank, world_size, device = self.group.rank, self.group.world_size, self.group.device
        # Do not divide this by the number of ranks: the last bits of the loss would depend on that number.
        batch_size = min(_MAX_BATCH, self.config.batch_size)
        losses = torch.zeros(-(-len(source) // batch_size), dtype=torch.float64, device=device)
        times_evaluated = torch.zeros(len(source), dtype=torch.int64, device=device)
        shown = torch.zeros(len(source), dtype=torch.int64, device=device)
        predicted = torch.zeros(len(source), dtype=torch.int64, device=device)
        top5_correct = torch.zeros((), dtype=torch.int64, device=device)
        corrupt: set[int] = set()
        requests = evaluation_requests(len(source), batch_size, rank, world_size)
        # A worker makes a whole batch, and only for this evaluation: more workers than batches would be idle.
        workers = min(self.workers, -(-len(source) // (batch_size * world_size)))
        with load_device_batches(device, source, requests, workers) as batches:
            for number, batch in enumerate(batches):
                before_batch()
                if len(batch.labels):
                    indices = batch.indices.to(device, non_blocking=True)
                    labels = batch.labels.to(device, non_blocking=True)
                    results = self._evaluate_batch(batch.images, labels, top5_correct)
                    losses[number * world_size + rank], predicted[indices] = results
                    shown[indices] = labels
                    times_evaluated[indices] += 1
                    corrupt.update(batch.corrupt.tolist())
                elif self.config.strategy == "fsdp":
                    # Other ranks need this rank's shard of the model for their forward pass.
                    with torch.inference_mode():
                        self.model(self.preprocess(batch.images.new_zeros(1, *batch.images.shape[1:])))
        all_reduce = self.group.all_reduce
        result = Evaluation(
            labels=all_reduce(shown),
            # For each value, one rank has the result and all others have zero, so the sum is not rounded.
            loss=math.fsum(all_reduce(losses).tolist()) / len(source),
            corrupt=tuple(sorted(set().union(*self.group.all_gather_json(list(corrupt))))),
            predicted=all_reduce(predicted),
            top5_correct=int(all_reduce(top5_correct)),
        )
        if wrong := int((all_reduce(times_evaluated) != 1).sum()):
            raise AssertionError(f"{wrong} of {len(source)} images were not evaluated exactly once")
        return result

    def evaluate_weights(
        self, weights: Iterable[tuple[str, Tensor]], source: ImageSource, before_batch: Callable[[], object]
    ) -> Evaluation:
        """Load other weights, tensor by tensor, evaluate the model with them, and restore its own weights."""
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        load_full_state_dict(self.model, weights)
        try:
            return self.evaluate(source, before_batch)
        finally:
            load_full_state_dict(self.model, own.items())

    @torch.inference_mode()
    def _evaluate_batch(self, images: Tensor, labels: Tensor, top5_correct: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch's loss and predicted classes. Adds the batch to `top5_correct`."""
        with autocast(self.config, self.group.device):
            logits = self.model(self.preprocess(images)).float()
        # To count the classes with higher logits would be wrong for equal logits, frequent in bfloat16, and for NaN.
        most_likely = logits.topk(min(_TOP_K, logits.shape[1])).indices
        top5_correct += (most_likely == labels[:, None]).sum()
        return functional.cross_entropy(logits, labels, reduction="sum"), logits.argmax(1)
