"""Whole trainings: what they write, for any world size, and how they report mistakes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.trainings import Starter, Training, events, final, lines, losses, make_folder, make_idx, result
from torchrelay.checkpoint_files import list_checkpoints

from hpc.base.errors import EXIT_DIVERGED

SHORT = ("--epochs=2", "--batch-size=20", "--log-every=3", "--lr=0.05")


def refused(training: Training, world_size: int = 1) -> str:
    """The one line of the error, without a traceback."""
    assert training.wait() == [2] * world_size, training.output()
    output = [line for line in training.output().splitlines() if "[Gloo]" not in line]
    assert len([line for line in output if line.startswith("error: ")]) == 1, training.output()
    assert "Traceback" not in training.output()
    return next(line for line in output if line.startswith("error: "))


def test_a_training_learns_and_writes_all_its_files(start: Starter) -> None:
    run = start.complete("--epochs=6", "--batch-size=20", "--log-every=7", "--lr=0.05", world_size=2).run_dir

    outcome, best = result(run), result(run, "best")
    assert outcome["test_accuracy"] > 0.6, "a third would be chance"
    assert outcome["test_total"] == 101
    assert outcome["test_correct"] / 101 == outcome["test_accuracy"]
    assert outcome["classes"] == ["0", "1", "2"]
    assert outcome["step"] == 54
    assert outcome["config"]["epochs"] == 6
    assert best["val_accuracy"] == outcome["best_val_accuracy"]
    assert load_file(run / "best" / "model.safetensors").keys()

    train = lines(run / "metrics" / "train.jsonl")
    assert [line["step"] for line in train] == [7, 9, 14, 18, 21, 27, 28, 35, 36, 42, 45, 49, 54]
    assert [line["epoch"] for line in train] == [1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 6, 6]
    assert train[0].keys() == {
        *("step", "epoch", "loss", "lr", "images_per_second", "world_size", "train_seconds", "attempt", "time"),
        *("accuracy", "data_wait_share", "memory_bytes"),
    }
    assert train[-1]["accuracy"] > 0.5, "it learns"
    assert all(0 <= line["data_wait_share"] <= 1 for line in train)
    assert all(10 * 2**20 < line["memory_bytes"] < 2**40 for line in train)
    evaluations = lines(run / "metrics" / "eval.jsonl")
    assert [(line["epoch"], line["split"]) for line in evaluations] == [*((n, "val") for n in range(1, 7)), (6, "test")]
    assert all(line["correct"] / line["total"] == line["accuracy"] for line in evaluations)

    assert [event["step"] for event in events(run, "checkpoint_saved")] == [9, 18, 27, 36, 45, 54]
    assert [event["world_size"] for event in events(run, "train_started")] == [2]
    assert [event["step"] for event in events(run, "train_completed")] == [54]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000045", "step-00000054"]
    assert list((run / "tensorboard").iterdir())
    assert run.stat().st_mode & 0o777 == 0o700


def test_a_complete_run_is_left_alone(start: Starter) -> None:
    run = start.complete("--epochs=1", "--batch-size=90").run_dir
    before = (run / "final" / "result.json").stat().st_mtime_ns
    again = start("--epochs=1", "--batch-size=90")
    assert again.wait() == [0]
    assert "is already complete" in again.output()
    assert (run / "final" / "result.json").stat().st_mtime_ns == before
    assert len(events(run, "train_started")) == 1


@pytest.mark.parametrize(("world_size", "more"), [(3, ()), (2, ("--grad-accum-steps=3",))])
def test_the_gradient_is_that_of_the_global_batch_however_it_is_shared(
    start: Starter, world_size: int, more: tuple[str, ...]
) -> None:
    flags = ("--epochs=1", "--batch-size=7", "--log-every=1", "--label-smoothing=0.1", "--lr=0.02")
    alone = start.complete(*flags, run="alone").run_dir
    shared = start.complete(*flags, *more, run="shared", world_size=world_size).run_dir
    assert len(losses(alone)) == 27
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-3)
    for name, value in final(alone).items():
        assert torch.allclose(value, final(shared)[name], rtol=1e-3, atol=1e-4), name


def test_without_a_validation_set_there_is_no_best_and_without_a_test_set_no_test(
    start: Starter, tmp_path: Path
) -> None:
    start.data = make_folder(tmp_path / "data", parts=("train",)) / "train"
    run = start.complete(*SHORT, "--val-split=0").run_dir
    assert not (run / "best").exists()
    assert (result(run)["val_accuracy"], result(run)["test_accuracy"], result(run)["best"]) == (None, None, None)


def test_data_that_are_missing_on_one_node_end_all_ranks_with_one_line(start: Starter, tmp_path: Path) -> None:
    training = start(*SHORT, world_size=2, data=[start.data, tmp_path / "not-staged"])
    assert refused(training, 2) == (
        f"error: rank 1: --data is {tmp_path}/not-staged, which does not exist: give a directory, fashion-mnist or "
        "digits"
    )


def test_nodes_with_different_data_are_refused(start: Starter, tmp_path: Path) -> None:
    other = make_idx(tmp_path / "other", train=200)
    message = refused(start(*SHORT, world_size=2, data=[start.data, other]), 2)
    assert message.startswith("error: --data differs between nodes: rank 0 has 193 training images, rank 1 has 190")


@pytest.fixture
def corrupt_data(tmp_path: Path) -> Path:
    """Image folders with three unreadable images for training and one for the test."""
    data = make_folder(tmp_path / "data")
    for name in ("train/red/4.jpg", "train/red/5.png", "train/green/0.jpg", "test/blue sky/0.jpg"):
        (data / name).write_bytes(b"no image")
    return data


def test_unreadable_images_are_replaced_counted_and_listed(start: Starter, corrupt_data: Path) -> None:
    start.data = corrupt_data
    corrupt = [str(corrupt_data / "train" / name) for name in ("green/0.jpg", "red/4.jpg", "red/5.png")]
    weights = []
    flags = ("--epochs=3", "--batch-size=4", "--lr=0.01", "--image-size=32", "--num-workers=0")
    for run, world_size in (("alone", 1), ("shared", 2)):
        training = start.complete(*flags, run=run, world_size=world_size)
        weights.append(final(training.run_dir))
        assert sorted(event["detail"] for event in events(training.run_dir, "image_corrupt")) == corrupt
        assert result(training.run_dir)["corrupt_images"] == corrupt
        assert all(training.output().count(f"warning: {path} cannot be read") == 1 for path in corrupt)
        assert lines(training.run_dir / "metrics" / "eval.jsonl")[-1]["corrupt"] == 1
        assert (
            f"test: other images replace 1 that cannot be read: {corrupt_data}/test/blue sky/0.jpg" in training.output()
        )
    assert all(torch.allclose(value, weights[1][name], atol=1e-3) for name, value in weights[0].items())


def test_too_many_unreadable_images_end_the_training_with_their_names(start: Starter, corrupt_data: Path) -> None:
    start.data = corrupt_data
    message = refused(start(*SHORT, "--max-corrupt-images=2", "--epochs=9", world_size=2), 2)
    assert message.startswith(
        "error: 3 images cannot be read, more than --max-corrupt-images 2: replace them or raise it: "
    )
    assert all(f"{corrupt_data}/train/{name}" in message for name in ("green/0.jpg", "red/4.jpg", "red/5.png"))


def test_a_training_set_smaller_than_the_batch_is_one_batch(start: Starter) -> None:
    training = start.complete("--epochs=2", "--batch-size=999", "--lr=0.01")
    assert result(training.run_dir)["step"] == 2


def test_too_many_unreadable_images_end_an_evaluation_too(start: Starter, corrupt_data: Path) -> None:
    start.data = corrupt_data
    for broken in corrupt_data.glob("train/red/*"):
        broken.write_bytes((corrupt_data / "train/red/0.jpg").read_bytes())
    (corrupt_data / "train/green/0.jpg").unlink()
    message = refused(start(*SHORT, "--max-corrupt-images=0"))
    assert message == (
        "error: 1 images cannot be read, more than --max-corrupt-images 0: "
        f"replace them or raise it: {corrupt_data}/test/blue sky/0.jpg"
    )


@pytest.fixture(scope="module")
def unfinished(idx_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run with a checkpoint and no `final/`."""
    start = Starter(idx_data, tmp_path_factory.mktemp("unfinished"))
    training = start.complete("--epochs=1", "--image-size=24", *SHORT[1:])
    shutil.rmtree(training.run_dir / "final")
    return training


def test_a_checkpoint_of_other_settings_is_not_resumed(start: Starter, unfinished: Training) -> None:
    start.copy(unfinished)
    message = "--batch-size is 21, but step-00000009 was made with 20: use that, or another --run-dir"
    assert message in refused(start(*SHORT, "--image-size=24", "--batch-size=21"))


def test_a_checkpoint_of_other_data_is_not_resumed(start: Starter, unfinished: Training, tmp_path: Path) -> None:
    start.copy(unfinished)
    start.data = make_idx(tmp_path / "other", train=300)
    message = refused(start(*SHORT, "--image-size=24"))
    assert message.startswith("error: --data has train samples 285, but step-00000009 was made with 193: use the same")


def test_data_may_lie_elsewhere_in_the_next_attempt(start: Starter, unfinished: Training, tmp_path: Path) -> None:
    start.copy(unfinished)
    shutil.copytree(start.data, tmp_path / "elsewhere")
    start.data = tmp_path / "elsewhere"
    run = start.complete(*SHORT, "--image-size=24").run_dir
    assert events(run, "train_started")[1]["step"] == 9


def test_a_training_that_diverges_ends_and_saves_nothing_of_it(start: Starter) -> None:
    training = start(*SHORT, "--lr=1e30", "--checkpoint-every=1", "--warmup-epochs=0")
    assert training.wait() == [EXIT_DIVERGED], training.output()
    assert "error: the loss is nan since step 2: the training has diverged, use a smaller --lr" in training.output()
    for checkpoint in (training.run_dir / "checkpoints").iterdir():
        loss = load_file(checkpoint / "state.safetensors")["loss_meter/loss"]
        assert torch.isfinite(loss)


def test_flags_that_may_change_take_effect_from_the_checkpoint_on(start: Starter, unfinished: Training) -> None:
    start.copy(unfinished)
    flags = ("--weight-decay=0.125", "--decay-norm-and-bias", "--momentum=0.5")
    run = start.complete(*SHORT, "--image-size=24", *flags).run_dir
    newest = list_checkpoints(run / "checkpoints")[0]
    [weights, others] = json.loads((newest / "state.json").read_text())["objects"]["optimizer"]["param_groups"]
    assert weights["weight_decay"] == others["weight_decay"] == 0.125
    assert weights["momentum"] == others["momentum"] == 0.5


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--grad-accum-steps=8",), "in 8 parts each"),
        (("--mixup=0.2", "--grad-accum-steps=3"), "in 3 parts each, in pairs to be mixed"),
    ],
)
def test_fewer_images_than_micro_batches_are_refused(
    start: Starter, tmp_path: Path, flags: tuple[str, ...], parts: str
) -> None:
    start.data = make_idx(tmp_path / "ten", train=10)
    assert refused(start("--val-split=0", *flags, world_size=2), 2) == (
        f"error: --data has 10 training images, too few for the 2 ranks that share it {parts}: "
        "use fewer ranks or a smaller --grad-accum-steps"
    )


def test_an_unusable_run_directory_is_refused_in_one_line(start: Starter) -> None:
    (start.directory / "run").write_text("a file")
    message = refused(start(*SHORT, world_size=2), 2)
    assert message.startswith(f"error: rank 0: --run-dir is {start.directory}/run, which cannot be made (")
    assert message.endswith("): use another directory")


def test_a_data_set_without_images_is_refused_in_one_line(start: Starter, tmp_path: Path) -> None:
    start.data = make_idx(tmp_path / "empty", test=0)
    assert refused(start(*SHORT)).endswith(
        "t10k-images-idx3-ubyte.gz is [0, 1, 12, 12], which is not an image: replace it"
    )
