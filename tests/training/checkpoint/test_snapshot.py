"""Snapshots: they limit what a crash loses, and change nothing else."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.trainings import Starter, Training, events, lines, slow
from torchrelay import node_memory
from torchrelay.checkpoint_files import list_checkpoints, step_of
from torchrelay.node_memory import available_memory_bytes, cgroup_available_bytes, lacking_space

from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir
from training.checkpoint.snapshot import save_newest_as_checkpoint
from training.verify_resume.compare import compare_runs

# 203 images less 41 held out: 27 steps of 6 an epoch, 54 in all. Checkpoints are at the epochs' ends.
FLAGS = ("--epochs=2", "--batch-size=6", "--val-split=0.2", "--log-every=1", "--lr=0.02", "--warmup-epochs=0.1")
EVERY = 2
# Batch statistics and their average differ by rank between the steps.
NORMALISED = ("--model=shufflenet_v2_x0_5", "--image-size=32", "--batch-size=20", "--ema-decay=0.9", "--val-split=0.2")
NORMALISED += ("--epochs=2", "--log-every=1", "--lr=0.01")


def assert_same(one: Path, other: Path) -> None:
    assert [part for part in compare_runs(RunDir(one), RunDir(other)) if part.difference] == []


def slow_steps(seconds: float = 0.03, most: int = 1000, fast: int = 1000) -> None:
    """In a rank: make steps slower than writing a snapshot, after `fast` ones even on a busy core.

    After `most` of them, wait to be killed.
    """
    from training.engine.step import Stepper

    step, numbers = Stepper.step, count(1)

    def slow_step(stepper: Stepper, *arguments: Any) -> None:
        number = next(numbers)
        time.sleep(600 if number > most else 0.5 if number > fast else seconds)
        step(stepper, *arguments)

    Stepper.step = slow_step  # type: ignore[method-assign]


def on_its_own_node(nodes: Path) -> None:
    """In a rank: pretend to be alone on a node with its own memory."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    sys.argv.append(f"--node-dir={nodes / os.environ['RANK']}")
    slow_steps(most=15)


def steps_of(node: NodeDir) -> list[int]:
    return [step_of(path) for path in list_checkpoints(node.snapshots)]


@pytest.fixture(scope="module")
def killed_once(idx_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training that is killed between two checkpoints, with two newer snapshots in `node`."""
    start = Starter(idx_data, tmp_path_factory.mktemp("killed"))
    node = start.directory / "node"
    node.mkdir(mode=0o700)
    flags = (*FLAGS, f"--snapshot-every={EVERY}", f"--node-dir={node}")
    training = start(*flags, world_size=2, prepare=partial(slow_steps, most=53, fast=27))
    # On a busy machine, some steps have no snapshot.
    training.wait_until(lambda: any(step > 27 for step in steps_of(NodeDir(node))[1:]))
    training.kill()
    return training


@pytest.fixture
def empty_node(tmp_path: Path) -> NodeDir:
    (tmp_path / "node").mkdir(mode=0o700)
    return NodeDir(tmp_path / "node")


def resume(start: Starter, node: NodeDir, *flags: str, world_size: int = 2) -> Training:
    return start.complete(*FLAGS, f"--snapshot-every={EVERY}", f"--node-dir={node.path}", *flags, world_size=world_size)


def test_a_kill_loses_only_the_steps_since_the_last_snapshot(start: Starter, cut: Training, node: NodeDir) -> None:
    whole = start.complete(*FLAGS, f"--snapshot-every={EVERY}", run="whole", world_size=2)
    newest, before = max(steps_of(node)), lines(cut.run_dir / "metrics/train.jsonl")

    assert "resuming from snapshot step-000000" in resume(start, node).output()

    [first, started] = events(cut.run_dir, "train_started")
    assert started["step"] == newest > 27, "after the newest checkpoint"
    assert started["source"] == "snapshot"
    assert started["restored_from"] == f"step-{started['step']:08d}"
    assert started["restore_seconds"] >= 0
    assert_same(whole.run_dir, cut.run_dir)
    assert steps_of(node) == [], "a training that is complete leaves no snapshots"
    assert list(node.snapshots.iterdir()) == []

    after = lines(cut.run_dir / "metrics/train.jsonl")
    assert [line["step"] for line in after] == list(range(1, 55))
    seconds = [line["train_seconds"] for line in after]
    assert seconds[:newest] == [line["train_seconds"] for line in before[:newest]]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert seconds[-1] < after[-1]["time"] - first["time"]


def test_a_state_restored_from_a_snapshot_is_soon_durable(start: Starter, cut: Training, node: NodeDir) -> None:
    before = len(events(cut.run_dir, "checkpoint_saved"))
    resume(start, node, "--checkpoint-every=1h")
    first = events(cut.run_dir, "checkpoint_saved")[before]["step"]
    assert first - events(cut.run_dir, "train_started")[1]["step"] <= 1


def keep_snapshots(seconds: float) -> None:
    """In a rank: make slow steps, and remove no snapshots."""
    from training.checkpoint import saver

    slow_steps(seconds)
    saver.remove_newer = lambda _directory, _step: None


@pytest.fixture(scope="module")
def without(idx_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two ranks without --node-dir, so without snapshots."""
    start = Starter(idx_data, tmp_path_factory.mktemp("without"))
    return start.complete(*NORMALISED, "--snapshot-every=1", world_size=2).run_dir


def with_interval(run: Path, every: str, directory: Path) -> Path:
    """A copy of the run with another --snapshot-every in its results."""
    shutil.copytree(run, directory)
    for path in directory.rglob("result.json"):
        result = json.loads(path.read_text())
        assert result["config"]["snapshot_every"] == "1"
        result["config"]["snapshot_every"] = every
        path.write_text(json.dumps(result))
    return directory


@pytest.mark.parametrize(("every", "seconds"), [("3", 0.03), slow("auto", 0.15)])
def test_taking_snapshots_changes_nothing(
    start: Starter, empty_node: NodeDir, without: Path, every: str, seconds: float
) -> None:
    flags = (*NORMALISED, f"--snapshot-every={every}", f"--node-dir={empty_node.path}")
    training = start(*flags, world_size=2, prepare=partial(keep_snapshots, seconds))
    assert training.wait() == [0, 0], training.output()
    assert_same(with_interval(without, every, start.directory / "without"), training.run_dir)
    assert steps_of(empty_node), "there were no snapshots"


def test_the_snapshot_of_any_node_holds_the_whole_state(start: Starter, tmp_path: Path, without: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    flags = (*NORMALISED, "--snapshot-every=2")
    cut = start(*flags, world_size=2, prepare=partial(on_its_own_node, nodes))
    # A snapshot of the checkpoint's step would not be taken.
    cut.wait_until(lambda: any(step > 8 for step in steps_of(NodeDir(nodes / "1"))))
    cut.kill()
    assert (cut.run_dir / "checkpoints/step-00000008").exists()
    snapshots = steps_of(NodeDir(nodes / "1"))
    shutil.rmtree(nodes / "0")

    again = start(*flags, world_size=2, prepare=partial(on_its_own_node, nodes))
    assert again.wait() == [0, 0], again.output()
    [_, started] = events(cut.run_dir, "train_started")
    assert (started["source"], started["step"]) == ("snapshot", snapshots[0])
    assert_same(with_interval(without, "2", tmp_path / "without"), cut.run_dir)
    assert steps_of(NodeDir(nodes / "0")) == steps_of(NodeDir(nodes / "1")) == []


def tear(snapshot: Path) -> None:
    state = snapshot / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])


def remove_values(snapshot: Path) -> None:
    (snapshot / "state.json").unlink()


def write_another_format(snapshot: Path) -> None:
    values = snapshot / "state.json"
    values.write_text(values.read_text().replace('"format": 1', '"format": 0'))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (tear, "state.safetensors is not as it was written"),
        (remove_values, "[Errno 2] No such file or directory"),
        (write_another_format, "it has format 0 instead of 1"),
    ],
)
def test_a_damaged_snapshot_is_skipped(
    start: Starter, cut: Training, node: NodeDir, damage: Callable[[Path], None], reason: str
) -> None:
    newest, older, *_ = list_checkpoints(node.snapshots)
    damage(newest)
    resumed = resume(start, node)
    assert f"warning: snapshot {newest} is not used: {reason}" in resumed.output()
    assert events(cut.run_dir, "checkpoint_rejected")[0]["detail"].startswith(str(newest))
    assert events(cut.run_dir, "train_started")[1]["restored_from"] == older.name


def forget_metrics(run: Path, node: NodeDir) -> None:
    """Remove the lines of the newest snapshot, as if rank 0 had died before it wrote them."""
    newest = steps_of(node)[0]
    path = run / "metrics/train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(path) if line["step"] < newest))


def forget_the_validation(run: Path, node: NodeDir) -> None:
    assert steps_of(node)
    (run / "metrics/eval.jsonl").write_text("")


def forget_the_best(run: Path, node: NodeDir) -> None:
    assert steps_of(node)
    shutil.rmtree(run / "best")


@pytest.mark.parametrize(
    ("forget", "what"),
    [
        (forget_metrics, "train.jsonl ends with step "),
        (forget_the_validation, "eval.jsonl lacks the validation of epoch 1"),
        (forget_the_best, "best lacks the best model"),
    ],
)
def test_a_snapshot_newer_than_the_metrics_is_not_used(
    start: Starter, cut: Training, node: NodeDir, forget: Callable[[Path, NodeDir], None], what: str
) -> None:
    steps = steps_of(node)
    forget(cut.run_dir, node)
    output = resume(start, node).output()
    assert f"warning: snapshot {node.snapshots}/step-{steps[0]:08d} is not used: {cut.run_dir}" in output
    assert what in output
    started = events(cut.run_dir, "train_started")[1]
    assert started["step"] == (steps[1] if forget == forget_metrics else 27)
    logged = [line["step"] for line in lines(cut.run_dir / "metrics/train.jsonl")]
    assert logged == list(range(1, 55))


def test_another_runs_snapshot_is_removed_and_not_used(start: Starter, node: NodeDir) -> None:
    flags = (*FLAGS, "--seed=1", f"--node-dir={node.path}", "--snapshot-every=off", "--fault=step@1:0")
    training = start(*flags, run="other")
    assert training.wait() == [-9]
    assert "is not used: --seed is 1, but step-" in training.output()
    assert events(training.run_dir, "train_started")[0].get("source") is None
    assert steps_of(node) == []


def test_the_agent_saves_the_newest_snapshot_without_torch(start: Starter, cut: Training, node: NodeDir) -> None:
    newest = steps_of(node)[0]
    code = f"""
import sys
from pathlib import Path
from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir
from training.checkpoint.snapshot import save_newest_as_checkpoint
saved = save_newest_as_checkpoint(NodeDir(Path({str(node.path)!r})), RunDir(Path({str(cut.run_dir)!r})))
print(saved, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"{newest} False\n"
    assert save_newest_as_checkpoint(node, RunDir(cut.run_dir)) is None, "there is a checkpoint as new"
    assert [step_of(path) for path in list_checkpoints(cut.run_dir / "checkpoints")] == [newest, 27]
    shutil.rmtree(node.path)
    start.complete(*FLAGS, world_size=2)
    started = events(cut.run_dir, "train_started")[1]
    assert (started["source"], started["step"]) == ("checkpoint", newest)


def test_the_agent_saves_no_snapshot_newer_than_the_metrics(cut: Training, node: NodeDir) -> None:
    newest, older, *_ = steps_of(node)
    forget_metrics(cut.run_dir, node)
    assert save_newest_as_checkpoint(node, RunDir(cut.run_dir)) == older
    assert older < newest


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A file system smaller than a snapshot if we may mount one; else a directory that cannot be made."""
    place = tmp_path / "memory"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
    mounted = os.getuid() == 0 and not subprocess.run(mount, check=False).returncode
    (place / "file").touch()
    yield place if mounted else place / "file" / "node"
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


def pass_the_space_check() -> None:
    """In a rank: let the memory run full after the check."""
    from torchrelay.saving import node_snapshots

    node_snapshots.lacking_space = lambda *_, **__: ""


@pytest.mark.parametrize("prepare", [None, pass_the_space_check])
def test_without_memory_for_snapshots_the_training_goes_on_with_a_warning(
    start: Starter, small_memory: Path, prepare: Callable[[], None] | None
) -> None:
    training = start(*FLAGS, f"--node-dir={small_memory}", "--snapshot-every=5", "--ema-decay=0.9", prepare=prepare)
    assert training.wait() == [0], training.output()
    assert training.output().count("warning: snapshots are off on this node (") == 1
    assert len(events(training.run_dir, "snapshot_off")) == 1
    assert events(training.run_dir, "snapshot_off")[0]["reason"]
    left = list((small_memory / "snapshots").rglob("*")) if small_memory.exists() else []
    assert left == [], "half a snapshot is left"


def test_lacking_space_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacking_space(tmp_path, 1000) == ""
    free = shutil.disk_usage(tmp_path).free
    assert lacking_space(tmp_path, 2 * free).startswith(f"{tmp_path} has ")
    assert "free, and snapshots need" in lacking_space(tmp_path, 2 * free)
    monkeypatch.setattr(node_memory, "available_memory_bytes", lambda: 999)
    assert lacking_space(tmp_path, 1000).startswith("0.0 MB of memory are available")


def make_group(path: Path, **values: object) -> None:
    """The files of a control group."""
    path.mkdir(parents=True)
    for name, value in values.items():
        (path / f"memory.{name}").write_text(f"{value}\n")


def test_available_memory_is_limited_by_control_groups(tmp_path: Path) -> None:
    old, new = tmp_path / "memory/slurm/job_5", tmp_path / "slurm/job_5"
    cached = "cache 9\ntotal_inactive_file 20\ntotal_active_file 3\ninactive_file 1"
    make_group(old, limit_in_bytes=1000, usage_in_bytes=600, stat=cached)
    make_group(old / "step_0", limit_in_bytes=2**63, usage_in_bytes=600, stat=cached)
    assert min(cgroup_available_bytes("4:memory:/slurm/job_5/step_0\n3:cpuset:/", tmp_path)) == 1000 - 600 + 23
    make_group(new, max=500, current=700, stat="file 9\ninactive_file 0\nactive_file 5")
    make_group(new / "step_0", max="max", current=700, stat="file 9")
    assert list(cgroup_available_bytes("0::/slurm/job_5/step_0", tmp_path)) == [1], "there is none left"
    assert list(cgroup_available_bytes("0::/somewhere/else", tmp_path)) == []
    assert 0 < available_memory_bytes() < 2**60
