"""A training whose ranks hold a part of the model each does what one does whose ranks hold all of it."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.trainings import Ask, Starter, Training, events, final, lines, losses, same
from torch import Tensor
from torch.optim import AdamW
from torchrelay.checkpoint_files import STATE_VALUES, describe_file, list_checkpoints, step_of
from torchrelay.saving.restoring import read_state

from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir
from training.checkpoint.snapshot import save_newest_as_checkpoint
from training.config.train_config import TrainConfig
from training.engine import optim
from training.models.factory import build_model
from training.models.fsdp import blocks
from training.profile import main as profile

# 193 images for training: 9 steps of 20.
FLAGS = ("--epochs=1", "--batch-size=20", "--log-every=1", "--lr=0.02", "--warmup-epochs=0.1")
FSDP = (*FLAGS, "--strategy=fsdp")
# A busy machine writes a snapshot only every few steps.
LONGER = (*FSDP, "--epochs=5")


def newest(run_dir: Path) -> Path:
    return list_checkpoints(run_dir / "checkpoints")[0]


NORMALISED = ("--model=resnet20",)


def changes(run_dir: Path, before: dict[str, Tensor]) -> Tensor:
    """How far a training has moved its weights from those that it began with."""
    after = final(run_dir)
    return torch.cat([(after[name] - value).double().flatten() for name, value in before.items()])


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, ()),
        (2, (*NORMALISED, "--nesterov", "--clip-grad-norm=0.5", "--grad-accum-steps=2")),
        (3, ("--optimizer=adamw", "--lr=0.002", "--grad-accum-steps=2", "--clip-grad-norm=0.5", "--mixup=0.2")),
        (2, ("--amp=bf16",)),
    ],
)
def test_it_trains_as_ddp_does(start: Starter, world_size: int, options: tuple[str, ...]) -> None:
    # Three steps, enough for momentum: the two sum in different orders, and on some processors the rounding moves an
    # input of a ReLU across zero, which later steps amplify. A --clip-grad-norm that is 2 % off moves weights 2 % less.
    flags = ("--epochs=1", "--batch-size=60", "--log-every=1", "--lr=0.02", "--warmup-epochs=0", *options)
    whole = start.complete(*flags, run="ddp", world_size=world_size).run_dir
    parts = start.complete(*flags, "--strategy=fsdp", run="fsdp", world_size=world_size).run_dir
    # A sum in bfloat16 is rounded to 8 bits.
    tolerance = 5e-3 if "--amp=bf16" in options else 1e-3
    assert len(losses(whole)) == 3
    assert losses(parts) == pytest.approx(losses(whole), rel=tolerance / 20)
    assert final(whole).keys() == final(parts).keys()
    model = "resnet20" if NORMALISED[0] in options else "small-cnn"
    config = TrainConfig(data=str(start.data), model=model)
    before = dict(build_model(config, classes=3, channels=1, size=12).named_parameters())
    expected = changes(whole, before)
    difference = (changes(parts, before) - expected).norm() / expected.norm()
    assert difference < tolerance
    for name in final(whole).keys() - before:
        torch.testing.assert_close(final(parts)[name], final(whole)[name], rtol=tolerance, atol=tolerance)
    tested = [lines(run / "metrics" / "eval.jsonl")[-1] for run in (whole, parts)]
    assert tested[0]["total"] == tested[1]["total"] == 101
    assert tested[1]["loss"] == pytest.approx(tested[0]["loss"], rel=tolerance / 20)


def test_each_rank_holds_and_saves_its_part(start: Starter) -> None:
    run = start.complete(*FSDP, "--optimizer=adamw", "--lr=0.001", world_size=3).run_dir
    files = sorted(newest(run).glob("*.safetensors"))
    assert [file.name for file in files] == [f"state-0000{rank}-of-00003.safetensors" for rank in range(3)]
    held = [sum(value.numel() for value in load_file(file).values()) for file in files]
    weights = sum(value.numel() for value in final(run).values())
    # The weights and what Adam knows of each.
    assert sum(held) == pytest.approx(3 * weights, rel=1e-3)
    assert max(held) < 1.1 * weights
    assert {path.name for path in newest(run).iterdir()} == {*(f.name for f in files), "state.json", "manifest.json"}
    assert same({name: read_state(newest(run))[0][f"model/{name}"] for name in final(run)}, final(run))


def newest_before(training: Training, attempt: int) -> str:
    """The checkpoint that an attempt, counted from 0, has begun with."""
    return str(events(training.run_dir, "train_started")[attempt]["restored_from"])


def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before(start: Starter) -> None:
    cut = start(*FSDP, "--checkpoint-every=3", "--fault=save@5:1", world_size=2)
    assert cut.wait() == [1, -signal.SIGKILL], cut.output()
    assert [path.name for path in list_checkpoints(cut.run_dir / "checkpoints")] == ["step-00000003"]
    again = start.complete(*FSDP, world_size=2)
    assert newest_before(again, 1) == "step-00000003"
    assert not list((cut.run_dir / "checkpoints").glob(".*"))


def no_room_on_rank_1() -> None:
    """In a rank: another one's disk is full, until it is told to stop."""
    from torchrelay.saving.tensor_files import Image
    from torchrelay.stop_signals import signals

    write = Image.write

    def full(image: Image, file: Path, names: Collection[str]) -> dict[str, Any]:
        if os.environ["RANK"] == "1" and not signals.received():
            raise OSError(28, "No space left on device")
        return write(image, file, names)

    Image.write = full  # type: ignore[method-assign]


def test_what_one_rank_cannot_write_is_no_checkpoint_and_all_know(start: Starter) -> None:
    training = start(*FSDP, "--checkpoint-every=2", "--fault=stop@8:1", world_size=2, prepare=no_room_on_rank_1)
    assert training.wait() == [0, 0], training.output()
    assert (
        "warning: the checkpoint of step 2 was not saved (rank 1: [Errno 28] No space left on device)"
        in training.output()
    )
    assert [event["step"] for event in events(training.run_dir, "checkpoint_failed")][:2] == [2, 4]
    assert step_of(newest(training.run_dir)) == events(training.run_dir, "train_stopped")[0]["step"]
    assert not list((training.run_dir / "checkpoints").glob(".*"))


# --- snapshots ---


@pytest.fixture(scope="module")
def killed_once(idx_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training of two ranks that is killed at its 40th step, with snapshots and no newer checkpoint than step 3."""
    start = Starter(idx_data, tmp_path_factory.mktemp("killed"))
    (start.directory / "node").mkdir(mode=0o700)
    flags = (*LONGER, "--checkpoint-every=3", "--keep-checkpoints=99", "--snapshot-every=1", "--fault=step@40:1")
    cut = start(*flags, f"--node-dir={start.directory / 'node'}", world_size=2)
    cut.ranks[1].join()
    cut.kill()
    for path in list_checkpoints(cut.run_dir / "checkpoints"):
        if step_of(path) > 3:
            shutil.rmtree(path)
    return cut


def of_another_attempt(shard: Path) -> None:
    """Change the snapshots of a shard, though they are of the same steps."""
    for path in list_checkpoints(shard):
        manifest, numbers = path / "manifest.json", path / STATE_VALUES
        numbers.write_text(json.dumps(json.loads(numbers.read_text()) | {"attempt": 7}))
        known = json.loads(manifest.read_text())
        known["files"][STATE_VALUES] = describe_file(numbers)
        manifest.write_text(json.dumps(known))


@pytest.mark.parametrize("change", [shutil.rmtree, of_another_attempt])
def test_snapshots_are_of_no_use_if_a_part_is_lost_or_of_another_attempt(
    start: Starter, cut: Training, node: NodeDir, change: Callable[[Path], None]
) -> None:
    change(node.snapshots / "shard-00001-of-00002")
    assert save_newest_as_checkpoint(node, RunDir(cut.run_dir)) is None, "an agent takes a part for the whole"
    stopped = start(*LONGER, f"--node-dir={node.path}", "--fault=stop@6:0", world_size=2)
    assert stopped.wait() == [0, 0], stopped.output()
    assert newest_before(stopped, 1) == "step-00000003"
    assert events(stopped.run_dir, "train_started")[1]["source"] == "checkpoint"


def test_an_agent_saves_all_parts_as_a_checkpoint(start: Starter, cut: Training, node: NodeDir) -> None:
    whole = start.complete(*LONGER, run="whole", world_size=2)
    step = save_newest_as_checkpoint(node, RunDir(cut.run_dir))
    assert step is not None
    assert step > 3
    assert step_of(newest(cut.run_dir)) == step
    again = start.complete(*LONGER, world_size=2)
    started = events(again.run_dir, "train_started")[1]
    assert (started["source"], started["step"]) == ("checkpoint", step)
    assert same(final(again.run_dir), final(whole.run_dir))


# --- copies on another node ---


def held(nodes: Path) -> dict[str, set[int]]:
    """The numbers of the shards by node."""
    return {
        node.name: {int(path.name.split("-")[1]) for path in (node / "snapshots").glob("shard-*")}
        for node in sorted(nodes.glob("[0-9]"))
    }


def no_room_for_copies_on_node_1(nodes: Path) -> None:
    """In a rank, which is alone on its node: node 1 would keep more copies than its memory can hold."""
    from torchrelay.saving import node_snapshots

    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    sys.argv.append(f"--node-dir={nodes / os.environ['RANK']}")
    limit, lacking_space = list[int](), node_snapshots.lacking_space

    def lacking(directory: Path, size_bytes: int) -> str:
        limit.append(size_bytes)  # the first question is for the node's own shards
        return lacking_space(directory, size_bytes if size_bytes <= limit[0] else 10**15)

    if os.environ["RANK"] == "1":
        node_snapshots.lacking_space = lacking


def test_a_node_that_cannot_receive_copies_does_not_hinder_the_others(start: Starter, tmp_path: Path) -> None:
    for node in range(2):
        (tmp_path / str(node)).mkdir(mode=0o700)
    prepare = partial(no_room_for_copies_on_node_1, tmp_path)
    cut = start(*LONGER, "--snapshot-every=1", "--fault=step@40:1", world_size=2, prepare=prepare)
    cut.ranks[1].join()
    cut.kill()
    assert held(tmp_path) == {"0": {0}, "1": {1}}
    assert cut.output().count("warning: snapshots have no copies on other nodes (") == 1, cut.output()
    assert "and snapshots need 1,000,000," in cut.output()


# --- what it does not do ---


def test_a_profile_is_refused(ask: Ask) -> None:
    code, _, said = ask("--data=x", "--strategy=fsdp", program=profile)
    assert code == 2
    assert said.startswith("error: --strategy is fsdp, ")


def test_the_layers_of_a_transformer_are_gathered_one_at_a_time_and_as_a_whole() -> None:
    from torchvision.models import vit_b_16

    with torch.device("meta"):
        model = vit_b_16()
    names = [name for name, module in model.named_modules() if any(module is part for part in blocks(model))]
    layers = [f"encoder.layers.encoder_layer_{number}" for number in range(12)]
    assert sorted(names) == sorted(["conv_proj", "encoder", *layers, "heads.head"])


def test_a_list_of_blocks_is_gathered_block_by_block() -> None:
    from torchvision.models import maxvit_t

    with torch.device("meta"):
        model = maxvit_t()
    names = [name for name, module in model.named_modules() if any(module is part for part in blocks(model))]
    assert [name for name in names if name.startswith("blocks")] == [f"blocks.{number}" for number in range(4)]


def fused() -> None:
    """In a rank, fuse the kernels of AdamW, as on GPUs."""
    optim.AdamW = partial(AdamW, fused=True)  # type: ignore[assignment,misc]


@pytest.mark.slow
def test_torch_can_shard_an_optimizer_that_is_fused_on_gpus(start: Starter) -> None:
    """AdamW has the kernel of Adam; SGD is not fused (test_optim.py)."""
    flags = (*FSDP, "--optimizer=adamw", "--lr=0.002")
    whole = start.complete(*flags, run="whole", world_size=2, prepare=fused).run_dir
    cut = start(*flags, "--fault=stop@5:0", world_size=2, prepare=fused)
    assert cut.wait() == [0, 0], cut.output()
    start.complete(*flags, world_size=2, prepare=fused)
    assert same(final(cut.run_dir), final(whole))
    # Adam divides by roots of sums, which on some processors the two kernels round differently.
    plain = start.complete(*flags, run="plain", world_size=2).run_dir
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-3)
