"""An interrupted and resumed run ends with the same bytes as an uninterrupted one."""

import signal
from pathlib import Path
from typing import Any

import pytest
from support.trainings import Starter, events, final, lines, same, slow

from training.verify_resume.compare import OF_THE_ATTEMPT

# 203 images less 41 held out: 27 steps of 6 an epoch, 54 in all.
FLAGS = ("--epochs=2", "--batch-size=6", "--val-split=0.2", "--log-every=1", "--lr=0.02", "--warmup-epochs=0.1")
STEPS = 54


def assert_same_run(one: Path, other: Path) -> None:
    """Compare the weights bit by bit, and all metrics."""
    assert same(final(one), final(other))
    assert history(one, "train") == history(other, "train")
    assert history(one, "eval") == history(other, "eval")


def history(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    records = lines(run_dir / "metrics" / f"{kind}.jsonl")
    return [{name: value for name, value in record.items() if name not in OF_THE_ATTEMPT} for record in records]


@pytest.mark.parametrize(
    ("world_size", "number"),
    [
        (2, signal.SIGTERM),
        (3, signal.SIGUSR2),
        slow(1, signal.SIGTERM),
        slow(2, signal.SIGUSR2),
        slow(4, signal.SIGTERM),
    ],
)
def test_a_stop_in_the_middle_of_an_epoch_changes_nothing(start: Starter, world_size: int, number: int) -> None:
    whole = start.complete(*FLAGS, run="whole", world_size=world_size)

    cut = start(*FLAGS, run="cut", world_size=world_size)
    cut.wait_for_step(31)
    cut.send(number, world_size - 1)
    assert cut.wait() == [0] * world_size, cut.output()
    assert not (cut.run_dir / "final").exists(), "the run was over before it could be stopped"
    stopped = events(cut.run_dir, "train_stopped")
    assert [event["signal"] for event in stopped] == [signal.Signals(number).name]
    start.complete(*FLAGS, run="cut", world_size=world_size)

    assert_same_run(whole.run_dir, cut.run_dir)
    resumed = events(cut.run_dir, "train_started")[1]
    assert resumed["step"] == stopped[0]["step"], "steps were lost"
    assert resumed["restored_from"] == f"step-{stopped[0]['step']:08d}"
    assert [line["step"] for line in lines(cut.run_dir / "metrics" / "train.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_stop_changes_nothing_with_batch_statistics_dropout_workers_and_bfloat16(
    start: Starter, folder_data: Path
) -> None:
    start.data = folder_data
    flags = ("--model=mobilenet_v3_small", "--image-size=32", "--amp=bf16", "--num-workers=1", "--batch-size=5")
    flags = (*flags, "--epochs=3", "--log-every=4", "--lr=0.01", "--optimizer=adamw")
    whole = start.complete(*flags, run="whole", world_size=2)

    cut = start(*flags, run="cut", world_size=2)
    cut.wait_for_step(8)
    cut.send(signal.SIGTERM)
    assert cut.wait() == [0, 0], cut.output()
    assert not (cut.run_dir / "final").exists(), "the run was over before it could be stopped"
    start.complete(*flags, run="cut", world_size=2)

    assert_same_run(whole.run_dir, cut.run_dir)
