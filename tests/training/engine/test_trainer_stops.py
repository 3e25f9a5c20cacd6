"""Signals, kills and full disks at any moment: no more is lost than necessary."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.step_signals import send_to_step
from support.trainings import Starter, events, lines

from hpc.base.errors import EXIT_NO_SPACE
from hpc.base.kernel import in_signal_mask

# 193 images: 19 steps an epoch.
FLAGS = ("--epochs=3", "--batch-size=10", "--log-every=1", "--lr=0.05")
STEPS = 57


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def assert_whole_history(run_dir: Path) -> None:
    assert [line["step"] for line in lines(run_dir / "metrics" / "train.jsonl")] == list(range(1, STEPS + 1))
    evaluations = [(line["epoch"], line["split"]) for line in lines(run_dir / "metrics" / "eval.jsonl")]
    assert evaluations == [(1, "val"), (2, "val"), (3, "val"), (3, "test")]


def validate_after_the_signal() -> None:
    """In a rank: validate in many small batches, on rank 0 none before the signal."""
    from torchrelay.stop_signals import signals

    from training.data.batch_schedule import BatchRequest, evaluation_requests
    from training.evaluation import evaluator

    def late_requests(samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[BatchRequest]:
        while rank == 0 and not signals.received():
            time.sleep(0.01)
        yield from evaluation_requests(samples, batch_size, rank, world_size)

    evaluator._MAX_BATCH = 1  # noqa: SLF001
    evaluator.evaluation_requests = late_requests


def test_a_stop_in_a_validation_does_not_wait_for_its_end(start: Starter) -> None:
    training = start(*FLAGS, world_size=2, prepare=validate_after_the_signal)
    training.wait_until(lambda: len(events(training.run_dir, "checkpoint_saved")) == 1)
    send_to_step(signal.SIGTERM, training.ranks[0].pid or 0)
    assert training.wait() == [0, 0], training.output()
    assert not (training.run_dir / "metrics" / "eval.jsonl").exists(), "the validation went on"
    assert events(training.run_dir, "train_stopped")[0]["step"] == 19
    assert len(events(training.run_dir, "checkpoint_saved")) == 1, "there was nothing new to save"
    start.complete(*FLAGS, world_size=2)
    assert_whole_history(training.run_dir)


def tell_of_the_end() -> None:
    """In a rank: print when its trainer is destroyed."""
    from training.engine import launch

    make = launch.make_trainer

    def make_and_watch(*arguments: Any) -> object:
        trainer = make(*arguments)
        weakref.finalize(trainer, print, "the trainer is destroyed")
        return trainer

    launch.make_trainer = make_and_watch


def test_a_rank_ends_without_destroying_what_its_threads_use(start: Starter) -> None:
    # The destructor of DDP could wait for ever.
    training = start(*FLAGS, "--fault=stop@2:0", prepare=tell_of_the_end)
    assert training.wait() == [0], training.output()
    assert "destroyed" not in training.output() + start.complete(*FLAGS, prepare=tell_of_the_end).output()


def test_a_signal_while_torch_is_being_imported_is_remembered(idx_data: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "training", "--data", str(idx_data), "--run-dir", str(tmp_path / "run"), *FLAGS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        while not in_signal_mask(process.pid, "SigCgt", signal.SIGTERM):
            assert process.poll() is None
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    assert process.returncode == 0, output
    [stopped] = events(tmp_path / "run", "train_stopped")
    assert stopped["step"] < 3
    assert "stopped by SIGTERM" in output


def test_a_kill_loses_only_the_steps_since_the_last_checkpoint(start: Starter) -> None:
    flags = (*FLAGS, "--checkpoint-every=8")
    training = start(*flags, "--fault=step@30:0", world_size=2)
    assert -signal.SIGKILL in training.wait()
    saved = events(training.run_dir, "checkpoint_saved")[-1]["step"]
    with (training.run_dir / "metrics" / "train.jsonl").open("a") as file:
        file.write('{"step": 30, "lo')  # as a power cut leaves it
    start.complete(*flags, world_size=2)
    assert events(training.run_dir, "train_started")[1]["step"] == saved
    assert [event["step"] for event in events(training.run_dir, "checkpoint_saved")][-3:] == [48, 56, 57]
    assert_whole_history(training.run_dir)


def fail_to_save_after(step: int) -> None:
    """In a rank: fail to write the first checkpoint after a step, as on a full disk."""
    from torchrelay.saving import state_writer

    publish = state_writer.publish_checkpoint
    failed: list[int] = []

    def publish_or_fail(temporary: Path, at: int, *arguments: Any, **options: Any) -> Path:
        if at > step and not failed:
            failed.append(at)
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(temporary, at, *arguments, **options)

    state_writer.publish_checkpoint = publish_or_fail


def test_a_stop_retries_a_failed_checkpoint(start: Starter) -> None:
    training = start(*FLAGS, "--fault=stop@25:0", world_size=2, prepare=partial(fail_to_save_after, 19))
    assert training.wait() == [0, 0], training.output()
    [failed] = events(training.run_dir, "checkpoint_failed")
    [stopped] = events(training.run_dir, "train_stopped")
    assert stopped["step"] == failed["step"]
    assert names(training.run_dir / "checkpoints")[-1] == f"step-{stopped['step']:08d}"
    start.complete(*FLAGS, world_size=2)
    assert_whole_history(training.run_dir)


def fail_to_publish_once() -> None:
    """In a rank: fail to write the first best model, as on a full disk."""
    from training.monitoring import run_logger

    publish = run_logger.publish_directory
    failed: list[Path] = []

    def publish_or_fail(path: Path, *arguments: Any, **options: Any) -> None:
        if not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(path, *arguments, **options)

    run_logger.publish_directory = publish_or_fail


def test_a_best_model_that_failed_to_be_written_is_written_at_the_end(start: Starter) -> None:
    training = start("--epochs=1", "--batch-size=10", prepare=fail_to_publish_once)
    assert training.wait() == [0], training.output()
    assert f"warning: {training.run_dir}/best cannot be written (" in training.output()
    best, final = (json.loads((training.run_dir / name / "result.json").read_text()) for name in ("best", "final"))
    assert best["val_accuracy"] == final["best_val_accuracy"]
    assert final["best"]["test_total"] == 101


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None] | None]]:
    """A directory too small for two checkpoints: a small file system, or a limit of the file size."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        os.getuid() == 0
        and not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], check=False).returncode
    )
    yield disk, None if mounted else limit_files
    if mounted:
        subprocess.run(["umount", str(disk)], check=True)


def limit_files() -> None:
    """In a rank: limit files to a size between that of the metrics and that of a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_full_disk_does_not_stop_the_training(
    start: Starter, small_disk: tuple[Path, Callable[[], None] | None]
) -> None:
    disk, prepare = small_disk
    training = start(*FLAGS, run="disk/run", world_size=2, prepare=prepare)
    assert training.wait() == [EXIT_NO_SPACE if prepare is None else 1, 0], training.output()
    checkpoints = training.run_dir / "checkpoints"
    output = training.output()
    assert f"free some space below {checkpoints}" in output
    assert f"step {STEPS}/{STEPS}" in output, "the training did not go on"
    assert f"error: {training.run_dir}/final cannot be written (" in output
    assert "Traceback" not in output
    assert not [name for name in names(checkpoints) if not name.startswith("step-")], "half a checkpoint is left"

    if prepare is None:
        assert names(checkpoints) == ["step-00000019"], "the old checkpoint is lost"
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
    start.complete(*FLAGS, run="disk/run", world_size=2)
    assert [event["step"] for event in events(training.run_dir, "train_started")] == [0, 19 if prepare is None else 0]
    assert_whole_history(training.run_dir)
