"""Heartbeats: what a node agent reads about a rank, and that a failing heartbeat never hurts it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.trainings import Starter, children, lines, slow, wait_for_the_end_of
from torchrelay.progress_files import Heartbeat

from hpc.run.nodedir import NodeDir

FLAGS = ("--epochs=2", "--batch-size=20", "--log-every=1", "--lr=0.05")
STEPS = 18
FIELDS = {"rank", "pid", "step", "phase", "count", "time", "step_seconds", "busy_seconds"}


def read(path: Path) -> dict[str, Any]:
    """The newest whole record; nothing while there is none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError):
        return {}


@pytest.fixture
def node(tmp_path: Path) -> NodeDir:
    found = NodeDir(tmp_path / "node")
    found.heartbeat(0).parent.mkdir(parents=True)
    return found


def test_a_beat_is_one_record_of_one_size_that_the_next_one_replaces(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    heartbeat = Heartbeat(path, 3)
    heartbeat.beat("start")
    heartbeat.beat("load", 7)
    heartbeat.step_seconds, heartbeat.busy_seconds = 1 / 3, 2e-7
    heartbeat.beat("step")
    assert path.stat().st_size == 512
    record = read(path)
    assert record.keys() == FIELDS
    fields = {name: record[name] for name in ("rank", "step", "phase", "count", "step_seconds", "busy_seconds")}
    assert fields == {"rank": 3, "step": 7, "phase": "step", "count": 3, "step_seconds": 1 / 3, "busy_seconds": 2e-7}


def test_a_file_that_was_removed_is_written_again_by_whoever_has_its_place(tmp_path: Path) -> None:
    path = tmp_path / "node" / "beat"
    path.parent.mkdir()
    Heartbeat(path, 1).beat("start")
    heartbeat = Heartbeat(path, 3)
    heartbeat.beat("start")
    assert (read(path)["rank"], read(path)["count"]) == (3, 1)
    shutil.rmtree(path.parent)
    heartbeat.beat("load", 7)
    path.parent.mkdir()
    heartbeat.beat("step", 8)
    assert (read(path)["phase"], read(path)["step"]) == ("step", 8)


def wait_for_a_witness(directory: Path) -> None:
    """In a rank: as rank 1 go on with each new phase only when somebody has seen it."""
    beat = Heartbeat.beat

    def slow_beat(heartbeat: Heartbeat, phase: Any, *arguments: Any) -> None:
        beat(heartbeat, phase, *arguments)
        while os.environ["RANK"] == "1" and not (directory / phase).exists():
            time.sleep(0.002)

    Heartbeat.beat = slow_beat  # type: ignore[method-assign]


def test_every_phase_of_a_resumed_training_can_be_seen_from_outside(
    start: Starter, node: NodeDir, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    flags = (*FLAGS, f"--node-dir={node.path}")
    stopped = start(*flags, "--fault=stop@9:0", world_size=2)
    assert stopped.wait() == [0, 0], stopped.output()
    done = read(node.heartbeat(0))["step"]
    assert done == lines(stopped.run_dir / "metrics" / "train.jsonl")[-1]["step"]
    training = start(*flags, world_size=2, prepare=partial(wait_for_a_witness, seen))

    def has_seen_all() -> bool:
        if phase := read(node.heartbeat(1)).get("phase"):
            (seen / phase).touch()
        return {path.name for path in seen.iterdir()} == {"start", "load", "step", "save", "evaluate", "end"}

    training.wait_until(has_seen_all)
    assert training.wait() == [0, 0], training.output()
    beats = [read(node.heartbeat(rank)) for rank in range(2)]
    assert [beat["rank"] for beat in beats] == [0, 1]
    assert [beat["pid"] for beat in beats] == [rank.pid for rank in training.ranks]
    for beat in beats:
        assert (beat["phase"], beat["step"]) == ("end", STEPS)
        assert beat["count"] > 2 * (STEPS - done)
        assert 0 < beat["busy_seconds"] <= beat["step_seconds"]


# A model with batch statistics makes all ranks wait for rank 0 at the beginning of a forward pass.
@pytest.mark.parametrize(
    ("rank", "flags"),
    [(1, ()), slow(0, ("--model=shufflenet_v2_x0_5", "--image-size=24"))],
)
def test_a_single_slow_rank_stands_out(start: Starter, node: NodeDir, rank: int, flags: tuple[str, ...]) -> None:
    argv = ("--epochs=1", "--batch-size=64", *flags, f"--node-dir={node.path}", f"--fault=slow@1:{rank}")
    start.complete(*argv, world_size=2)
    beats = [read(node.heartbeat(each)) for each in range(2)]
    assert all(beat["step_seconds"] > 0.3 for beat in beats), "all ranks are as slow as the slowest"
    assert beats[rank]["busy_seconds"] > max(0.3, beats[1 - rank]["busy_seconds"])


def test_a_heartbeat_that_cannot_be_written_does_not_hurt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    Heartbeat(tmp_path / "missing" / "beat", 0).beat("start")
    Heartbeat(tmp_path, 0).beat("start")
    monkeypatch.setattr(os, "pwrite", full)
    Heartbeat(tmp_path / "beat", 0).beat("start")
    assert (tmp_path / "beat").stat().st_size == 0


def test_a_real_process_that_is_aborted_in_its_imports_prints_its_stacks(idx_data: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "training", "--data", str(idx_data), "--run-dir", str(tmp_path / "run")]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGABRT)
        _, output = process.communicate()
    assert process.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in output
    assert "in <module>" in output


def load_forever(started: Path) -> None:
    """In a rank: workers that never answer. Each leaves a file in `started` once it loads."""
    from training.data.dataset import ImageDataset

    def hang(_images: ImageDataset, _request: object) -> None:
        (started / str(os.getpid())).touch()
        time.sleep(600)

    ImageDataset.__getitem__ = hang  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_a_rank_that_waits_for_its_loader_dies_of_a_signal_and_its_workers_with_it(
    start: Starter, node: NodeDir, folder_data: Path, number: int
) -> None:
    start.data = folder_data
    flags = ("--batch-size=3", "--num-workers=2", "--image-size=24", f"--node-dir={node.path}")
    started = start.directory / "started"
    started.mkdir()
    training = start(*flags, prepare=partial(load_forever, started))
    rank = training.ranks[0].pid or 0
    training.wait_until(lambda: len(list(started.iterdir())) == 2)
    training.wait_until(lambda: read(node.heartbeat(0)).get("phase") == "load")
    workers = children(rank)
    os.kill(rank, number)  # as an agent does: the stacks of several processes would be mixed up
    assert training.wait() == [-number]
    assert ("in batches" in training.output()) == (number == signal.SIGABRT)
    for worker in workers:
        wait_for_the_end_of(worker)
