"""What a complete training leaves for others: tables, the history, and what the model was made from."""

import csv
import io
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.trainings import Starter, lines
from torchrelay.checkpoint_files import STATE_TENSORS, STATE_VALUES, list_checkpoints

from hpc.base.git import git_revision
from training.config.train_config import TrainConfig
from training.data.in_memory import read_idx_pair
from training.evaluation.evaluator import Evaluation
from training.evaluation.final_files import classes_csv, confusion_csv
from training.evaluation.validation import tables_of
from training.inference.classifier import load_classifier
from training.inference.model_card import read_card
from training.runtime.train_progress import Progress

FLAGS = ("--epochs=3", "--batch-size=20", "--lr=0.05", "--log-every=4")


@pytest.fixture(scope="module")
def run(idx_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("final")
    (directory / "recipe.yaml").write_text("recipe: fashion-mnist\n")
    config = f"--config={directory / 'recipe.yaml'}"
    return Starter(idx_data, directory).complete(config, *FLAGS, "--num-workers=0").run_dir


def test_a_model_says_what_it_was_made_from(run: Path, idx_data: Path) -> None:
    card = read_card((run / "final" / "model.json").read_text(), "model.json")
    assert (card.model, card.classes, card.image_shape) == ("small-cnn", ("0", "1", "2"), (1, 12, 12))
    made = card.made_from
    assert made["recipe"] == "fashion-mnist"
    assert made["config"]["epochs"] == 3
    assert made["data"]["path"] == str(idx_data)
    assert made["data"]["images"] == {"train": 193, "val": 10, "test": 101}
    numbers = json.loads((run / "checkpoints" / "step-00000027" / STATE_VALUES).read_text())
    assert made["data"]["fingerprint"] == numbers["identity"]["fingerprint"]
    assert made["versions"]["torch"] == version("torch")
    assert made["code"]["revision"] == git_revision(Path.cwd())
    assert (run / "best" / "model.json").exists()


def images_of(confusion: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The labels and predictions of the images that a confusion matrix counts."""
    counts = torch.tensor(confusion)
    pairs = torch.cartesian_prod(torch.arange(len(counts)), torch.arange(len(counts)))
    labels, predicted = pairs.repeat_interleave(counts.flatten(), dim=0).T
    return labels, predicted


def test_of_many_classes_there_is_no_matrix_of_all_pairs() -> None:
    nothing = torch.zeros(4, dtype=torch.int64)
    test = Evaluation(loss=0.0, labels=nothing, corrupt=(), predicted=nothing, top5_correct=0)
    tables = tables_of(test, tuple(map(str, range(30_000))))
    assert list(tables) == ["classes.csv"]
    assert len(tables["classes.csv"].splitlines()) == 30_001


def test_pairs_of_classes_are_counted_and_classes_have_recall_precision_and_f1() -> None:
    labels, predicted = images_of([[6, 2, 0], [1, 3, 0], [0, 0, 0]])
    pairs = csv.reader(io.StringIO(confusion_csv(labels, predicted, ("cat", "dog", "emu"))))
    assert list(pairs)[:3] == [["true class", "cat", "dog", "emu"], ["cat", "6", "2", "0"], ["dog", "1", "3", "0"]]
    rows = list(csv.DictReader(io.StringIO(classes_csv(labels, predicted, ("cat", "dog", "emu")))))
    assert [float(rows[0][name]) for name in ("accuracy", "precision", "f1")] == pytest.approx([6 / 8, 6 / 7, 0.8])
    assert (rows[0]["most confused with"], rows[0]["times"]) == ("dog", "2")
    assert [rows[2][name] for name in ("images", "accuracy", "precision", "f1", "most confused with")] == ["0"] + 4 * [
        ""
    ]


# --- the best model ---

SHAKY = ("--epochs=6", "--batch-size=20", "--lr=0.05", "--clip-grad-norm=1", "--warmup-epochs=0", "--val-split=0.2")


def unlearn_in_the_last_epoch() -> None:
    """In a rank: gradient ascent, so that the last model is not the best one."""
    from training.engine import step

    def learning_rate(_config: TrainConfig, _steps_per_epoch: int, progress: Progress) -> float:
        return 0.05 if progress.epoch < 5 else -0.1

    step.learning_rate = learning_rate


def result_of(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "result.json").read_text()))


def accuracy_of(model: Path, data: Path) -> float:
    """Accuracy of the model in a directory on the test images of IDX files."""
    images, labels = read_idx_pair(data, "test")
    return float((load_classifier(model).classify(images).argmax(1) == labels).float().mean())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ema", ["0", "0.5"])
def test_the_best_model_is_tested_too(start: Starter, ema: str) -> None:
    training = start(*SHAKY, f"--ema-decay={ema}", world_size=2, prepare=unlearn_in_the_last_epoch)
    assert training.wait() == [0, 0], training.output()
    final, best = (result_of(training.run_dir / name) for name in ("final", "best"))
    validations = [line for line in lines(training.run_dir / "metrics" / "eval.jsonl") if line["split"] == "val"]
    assert best["epoch"] == max(validations, key=lambda line: line["accuracy"])["epoch"]
    assert best["epoch"] < final["epoch"] == 6
    assert final["best"]["test_accuracy"] == pytest.approx(accuracy_of(training.run_dir / "best", start.data))
    assert final["test_accuracy"] == pytest.approx(accuracy_of(training.run_dir / "final", start.data))
    assert final["test_accuracy"] != final["best"]["test_accuracy"]
    assert all(final["best"][name] == best[name] for name in ("step", "epoch", "val_accuracy", "val_loss"))
    assert final["best"].keys() == {
        *("step", "epoch", "val_accuracy", "val_loss"),
        *("test_accuracy", "test_top5_accuracy", "test_loss", "test_correct", "test_total"),
    }
    assert f"; best model (epoch {best['epoch']}): " in training.output()
    state = load_file(list_checkpoints(training.run_dir / "checkpoints")[0] / STATE_TENSORS)
    weights = load_file(training.run_dir / "final" / "model.safetensors")
    prefix = "ema" if float(ema) else "model"
    assert all(torch.equal(value, state[f"{prefix}/{name}"]) for name, value in weights.items())


def test_if_the_last_model_is_the_best_its_test_counts_for_both(start: Starter) -> None:
    final = result_of(start.complete("--epochs=1", "--batch-size=20").run_dir / "final")
    assert final["best"]["test_loss"] == final["test_loss"]


def test_a_best_model_that_is_lost_costs_its_test_alone(start: Starter) -> None:
    stopped = start(*SHAKY, "--fault=stop@44:0", world_size=2, prepare=unlearn_in_the_last_epoch)
    assert stopped.wait() == [0, 0]
    shutil.rmtree(stopped.run_dir / "best")
    resumed = start(*SHAKY, world_size=2, prepare=unlearn_in_the_last_epoch)
    assert resumed.wait() == [0, 0], resumed.output()
    assert f"warning: {resumed.run_dir}/best cannot be read (" in resumed.output()
    final = result_of(resumed.run_dir / "final")
    assert (final["best"], final["test_total"]) == (None, 101)
