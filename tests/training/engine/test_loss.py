"""The losses are what their formulas say."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.trainings import Starter, lines, make_idx, write_idx
from torch import Tensor
from torch.nn import functional

from training.config.train_config import TrainConfig
from training.data.transforms.mixup import Mixup, mix_labels
from training.engine.loss import Loss, balanced_weights

CPU = torch.device("cpu")
LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0]])
LABELS = torch.tensor([0, 2])


def loss_of(targets: Tensor, labels: Tensor = LABELS, **settings: object) -> float:
    return float(Loss(TrainConfig(data="x", **settings), labels, 3, CPU)(LOGITS, targets))  # type: ignore[arg-type]


def binary(targets: list[list[float]]) -> float:
    """Each class by itself: -t log p - (1 - t) log (1 - p)."""
    wanted, found = torch.tensor(targets), LOGITS.sigmoid()
    return float((-wanted * found.log() - (1 - wanted) * (1 - found).log()).mean(1).sum())


def test_the_default_is_the_cross_entropy_bit_by_bit() -> None:
    found = Loss(TrainConfig(data="x", label_smoothing=0.1), LABELS, 3, CPU)(LOGITS, LABELS)
    assert torch.equal(found, functional.cross_entropy(LOGITS, LABELS, reduction="sum", label_smoothing=0.1))


def test_binary_cross_entropy_asks_for_each_class() -> None:
    assert loss_of(LABELS, loss="bce") == pytest.approx(binary([[1, 0, 0], [0, 0, 1]]))
    smoothed = binary([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]])
    assert loss_of(LABELS, loss="bce", label_smoothing=0.3) == pytest.approx(smoothed)


@pytest.mark.parametrize(("share", "targets"), [(0.7, [[1, 0, 1], [1, 0, 1]]), (0.9, [[1, 0, 0], [0, 0, 1]])])
def test_a_mixed_image_is_of_both_classes_if_they_show(share: float, targets: list[list[float]]) -> None:
    mixed = mix_labels(Mixup(lam=share, box=None), LABELS, 3)
    assert loss_of(mixed, loss="bce") == pytest.approx(binary(targets))


def test_balanced_weights_give_each_class_the_same_part_of_the_loss() -> None:
    labels = torch.tensor([0, 0, 0, 0, 0, 3, 3, 1])
    weights = balanced_weights(labels, 4)
    assert weights.tolist() == pytest.approx([8 / 15, 8 / 3, 0, 8 / 6])
    assert float(weights[labels].mean()) == pytest.approx(1)


def test_an_image_has_the_weight_of_its_class() -> None:
    labels = torch.tensor([0, 0, 2, 1, 1, 1])
    each = functional.cross_entropy(LOGITS, LABELS, reduction="none")
    assert loss_of(LABELS, labels, class_weights="balanced") == pytest.approx(float(each[0] * 1 + each[1] * 2))
    mixed = mix_labels(Mixup(lam=0.5, box=None), LABELS, 3)
    log_shares = LOGITS.log_softmax(1)
    wanted = float(-0.5 * (1 * log_shares[:, 0] + 2 * log_shares[:, 2]).sum())
    assert loss_of(mixed, labels, class_weights="balanced") == pytest.approx(wanted)


def test_ranks_agree_on_the_weighted_mean(start: Starter, tmp_path: Path) -> None:
    start.data = make_idx(tmp_path / "rare", train=70)
    # Class 2 has one image in ten, class 1 two; the ranks have 3, 2 and 2 images of each step.
    write_idx(start.data / "train-labels-idx1-ubyte", np.array([0, 0, 1, 0, 0, 2, 0, 1, 0, 0] * 7))
    flags = ("--class-weights=balanced", "--epochs=1", "--batch-size=7", "--log-every=1", "--lr=0.05")
    one, three = (
        lines(start.complete(*flags, run=str(ranks), world_size=ranks).run_dir / "metrics" / "train.jsonl")
        for ranks in (1, 3)
    )
    assert [line["loss"] for line in three] == pytest.approx([line["loss"] for line in one], rel=1e-4)
    unweighted = start.complete(*flags[1:], run="unweighted").run_dir / "metrics" / "train.jsonl"
    assert abs(lines(unweighted)[0]["loss"] - one[0]["loss"]) > 0.01
