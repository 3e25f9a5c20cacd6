"""Accuracies are those of torch's own functions."""

import pytest
import torch
from torch import Tensor, nn

from training.config.train_config import TrainConfig
from training.data.dataset import MemoryImages
from training.evaluation.evaluator import Evaluator
from training.runtime.process_group import ProcessGroup

LOGITS = torch.randn(400, 30, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(400) % 30


class Remembered(nn.Module):
    """A model of images whose two channels are their index: it returns the logits of that index."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: Tensor) -> Tensor:
        high, low = images.long().flatten(1).T
        return self.logits[256 * high + low]


@pytest.mark.parametrize(
    "logits",
    [
        pytest.param(LOGITS, id="all different"),
        pytest.param(LOGITS.round(), id="often the same"),
        pytest.param(torch.full((400, 30), torch.nan), id="no numbers"),
        pytest.param(LOGITS.where(LABELS[:, None] != torch.arange(30), torch.nan), id="no number for the true class"),
        pytest.param(LOGITS[:, :3], id="three classes"),
    ],
)
def test_the_five_most_likely_classes_are_those_of_torch(logits: Tensor, group: ProcessGroup) -> None:
    labels, index = LABELS % logits.shape[1], torch.arange(400)
    images = torch.stack([index // 256, index % 256], 1).to(torch.uint8)[..., None, None]
    evaluator = Evaluator(
        config=TrainConfig(data="x"),
        model=Remembered(logits),
        preprocess=lambda batch: batch,  # type: ignore[arg-type]  # the model takes bytes
        group=group,
        workers=0,
    )
    source = MemoryImages(images=images, labels=labels, title="the test set")
    most_likely = logits.topk(min(5, logits.shape[1])).indices
    expected = int((most_likely == labels[:, None]).any(1).sum())
    assert evaluator.evaluate(source, lambda: None).top5_correct == expected
