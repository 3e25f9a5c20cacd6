"""Accuracies are those of torch's own functions."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from training.config.train_config import TrainConfig
from training.evaluation.evaluator import Evaluator

LOGITS = torch.randn(400, 30, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(400) % 30


@pytest.mark.parametrize(
    "logits",
    [
        pytest.param(LOGITS, id="all different"),
        pytest.param(LOGITS.round(), id="often the same"),
        pytest.param(torch.zeros(400, 30), id="all the same"),
        pytest.param(torch.full((400, 30), torch.nan), id="no numbers"),
        pytest.param(LOGITS.where(LABELS[:, None] != torch.arange(30), torch.nan), id="no number for the true class"),
        pytest.param(LOGITS[:, :3], id="three classes"),
    ],
)
def test_the_five_most_likely_classes_are_those_of_torch(logits: Tensor) -> None:
    labels = LABELS % logits.shape[1]
    evaluator = Evaluator(
        config=TrainConfig(data="x"),
        model=nn.Identity(),
        preprocess=lambda images: images,
        group=SimpleNamespace(device=torch.device("cpu")),  # type: ignore[arg-type]  # needs no more
        workers=0,
    )
    correct = torch.zeros((), dtype=torch.int64)
    evaluator._evaluate_batch(logits, labels, correct)
    most_likely = logits.topk(min(5, logits.shape[1])).indices
    assert int(correct) == int((most_likely == labels[:, None]).any(1).sum())
