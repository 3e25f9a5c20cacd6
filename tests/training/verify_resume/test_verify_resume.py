"""Cut runs end as whole ones do: `training.verify_resume` with every option, and it reports when they do not."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainings import Ask, Starter, Training, make_folder, slow
from torchrelay.checkpoint_files import list_checkpoints

from hpc.run.rundir import RunDir
from training.config.train_config import TrainConfig
from training.models.factory import build_model
from training.verify_resume.__main__ import CUTS, draw_faults, main, verify
from training.verify_resume.compare import compare_runs
from training.verify_resume.local_launch import start_ranks, wait_for_ranks

# 203 images less 41 held out: 18 steps of 9 an epoch.
SHORT = {"epochs": 2, "batch_size": 9, "val_split": 0.2, "log_every": 1, "lr": 0.02, "checkpoint_every": "5"}
SNAPSHOTS = {"checkpoint_every": "1h", "snapshot_every": "2"}
SMALL_NORM = {"model": "shufflenet_v2_x0_5", "image_size": 32}
PHOTOS = {"image_size": 32, "batch_size": 8, "epochs": 3}


@pytest.mark.parametrize(
    ("data", "ranks", "options"),
    [
        ("idx_data", 2, {"amp": "fp16", "grad_accum_steps": 3, "clip_grad_norm": 0.5, "log_samples": True,
                         **SNAPSHOTS}),
        slow("idx_data", 3, {"strategy": "fsdp", "amp": "bf16", "grad_accum_steps": 2, "clip_grad_norm": 0.5,
                             "optimizer": "adamw", "lr": 0.002, "layer_decay": 0.75, **SNAPSHOTS}),
        slow("idx_data", 1, {"amp": "fp16", "clip_grad_norm": 1.0, "ema_decay": 0.9, "mixup": 0.2, "loss": "bce"}),
        slow("idx_data", 2, {"amp": "bf16", "mixup": 0.4, "cutmix": 1.0, "optimizer": "adamw", "lr": 0.002,
                             "momentum": 0.9, "layer_decay": 0.75, "min_lr": 0.0001}),
        slow("idx_data", 2, {**SMALL_NORM, "ema_decay": 0.99, "batch_size": 20, **SNAPSHOTS}),
        slow("idx_data", 2, {"lr_scheduler": "plateau", "plateau_patience": 0, "lr_gamma": 0.5, "optimizer": "adam",
                             "lr": 0.002, "grad_accum_steps": 2, "epochs": 3,
                             "early_stopping_patience": 3, "class_weights": "balanced"}),
        slow("idx_data", 2, {"decay_norm_and_bias": True, "lr_scaling": "sqrt", "lr": 0.1,
                             "compress_gradients": "bf16", "max_hours": 1.0, **SNAPSHOTS}),
        slow("idx_data", 4, {"grad_accum_steps": 2, "ema_decay": 0.99, "label_smoothing": 0.1, "num_workers": 1,
                             "deterministic": "error"}),
        ("folder_data", 2, {**PHOTOS, "crop": "resized", "flip": "on", "random_erasing": 0.5, "num_workers": 1}),
        slow("folder_data", 2, {**PHOTOS, "auto_augment": "trivialaugment", "num_workers": 0, "crop": "padded",
                                "model": "mobilenet_v3_small"}),
        slow("cifar_data", 2, {"auto_augment": "autoaugment", "crop": "resized", "flip": "on", "random_erasing": 0.3,
                               "lr_scaling": "linear", "val_split": 0.0, "keep_checkpoints": 1, "seed": 7,
                               "warmup_epochs": 0.5, "decay_norm_and_bias": True, "batch_size": 25}),
        ("packed_data", 2, {**PHOTOS, "num_workers": 1}),
        ("folder_data", 2, {**PHOTOS, "model": "resnet20", "initial_image_size": 16, "num_workers": 1, "cutmix": 1.0}),
        slow("packed_data", 1, {**PHOTOS, "auto_augment": "randaugment", "num_workers": 2, "mixup": 0.2,
                                "repeated_augmentation": 4}),
        slow(None, 2, {"synthetic": True, "image_size": 8, "epochs": 1, "batch_size": 4, "checkpoint_every": "20"}),
    ],
)  # fmt: skip
def test_a_run_with_these_options_is_bit_identical_however_it_is_cut(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data: str | None,
    ranks: int,
    options: dict[str, object],
) -> None:
    place = {"data": str(request.getfixturevalue(data))} if data else {}
    config = TrainConfig(**{**place, **SHORT, **options})  # type: ignore[arg-type]  # any of its fields
    same = verify(config, ranks, 4, tmp_path)
    output = capsys.readouterr().out
    assert same, output
    assert "bit-identical at step" in output
    assert "after 4 of 4 cuts" in output
    # A kill between the save of a checkpoint and the removal of the oldest leaves one more.
    assert len(list_checkpoints(tmp_path / "interrupted" / "checkpoints")) <= config.keep_checkpoints + 1


@pytest.mark.slow
def test_a_frozen_pretrained_model_is_bit_identical_too(
    idx_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SHORT, "model": "resnet20", "head_hidden": 8, "lr_scheduler": "step", "lr_step_epochs": "1"}
    config = TrainConfig(data=str(idx_data), ema_decay=0.9, **settings)  # type: ignore[arg-type]  # any of its fields
    torch.save(build_model(config, classes=5, channels=1, size=12).state_dict(), tmp_path / "w.pth")
    frozen = replace(config, weights=str(tmp_path / "w.pth"), freeze_backbone=True)
    assert verify(frozen, 2, 3, tmp_path), capsys.readouterr().out


@pytest.mark.slow
def test_images_that_cannot_be_read_are_exact_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_folder(tmp_path / "data")
    for name in ("train/red/2.jpg", "train/green/5.png", "test/red/0.jpg"):
        (data / name).write_bytes(b"torn")
    settings = {**SHORT, "image_size": 16, "batch_size": 7, "max_corrupt_images": 3, "epochs": 3, "num_workers": 0}
    assert verify(TrainConfig(data=str(data), **settings), 2, 3, tmp_path), capsys.readouterr().out  # type: ignore[arg-type]
    result = json.loads((tmp_path / "interrupted" / "final" / "result.json").read_text())
    assert len(result["corrupt_images"]) == 2


def test_a_rank_is_not_waited_for_that_waits_for_a_failed_one(idx_data: Path, tmp_path: Path) -> None:
    argv = ["--data", str(idx_data), "--run-dir", str(tmp_path / "run")]
    ranks = start_ranks([argv, [*argv, "--epochs=0"]], tmp_path / "log")
    assert wait_for_ranks(ranks, grace_seconds=1) == [None, 2]
    assert not any(rank.is_alive() for rank in ranks)


def test_cuts_are_at_every_kind_of_point_and_at_the_same_ones_again(idx_data: Path) -> None:
    config = TrainConfig(data=str(idx_data), seed=3, epochs=5)
    faults = draw_faults(config, 4, 8, 100, tuple(CUTS))
    assert sorted(fault.point for fault in faults) == sorted([*CUTS, *CUTS])
    assert all(1 <= fault.step <= 98 and 0 <= fault.rank < 4 for fault in faults)
    assert faults == draw_faults(config, 4, 8, 100, tuple(CUTS))
    assert faults != draw_faults(replace(config, seed=4), 4, 8, 100, tuple(CUTS))


def test_a_verification_that_could_not_make_its_cuts_proves_nothing(
    idx_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(data=str(idx_data), epochs=1, batch_size=193)
    assert not verify(config, 1, 6, tmp_path)
    assert "were possible: use more --epochs or fewer --cuts" in capsys.readouterr().out


@pytest.fixture(scope="module")
def finished(idx_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    start = Starter(idx_data, tmp_path_factory.mktemp("finished"))
    return start.complete("--epochs=1", "--batch-size=20", "--ema-decay=0.9")


@pytest.fixture
def two_runs(start: Starter, finished: Training) -> tuple[RunDir, RunDir]:
    """The same finished training, twice."""
    return RunDir(start.copy(finished, "one").run_dir), RunDir(start.copy(finished, "other").run_dir)


def differing(one: RunDir, other: RunDir) -> dict[str, str]:
    return {part.name: part.difference for part in compare_runs(one, other) if part.difference}


def test_one_different_bit_is_found_and_named(two_runs: tuple[RunDir, RunDir]) -> None:
    one, other = two_runs
    assert differing(one, other) == {}
    path = other.final / "model.safetensors"
    weights = load_file(path)
    weights["0.bias"][3] = torch.nextafter(weights["0.bias"][3], torch.tensor(1.0))
    save_file(weights, path)
    [(name, difference)] = differing(one, other).items()
    assert name == "final model"
    assert difference.startswith("0.bias: Tensor-likes are not equal! Mismatched elements: 1 / 16 ")


def test_a_different_state_or_history_is_found_and_named(two_runs: tuple[RunDir, RunDir]) -> None:
    one, other = two_runs
    path = list_checkpoints(other.checkpoints)[0] / "state.json"
    state = json.loads(path.read_text())
    state["objects"]["progress"]["samples_seen"] += 1
    path.write_text(json.dumps(state))
    lines = other.eval_metrics.read_text().splitlines(keepends=True)
    other.eval_metrics.write_text("".join(lines[:-1]))
    assert differing(one, other).keys() == {"progress", "history: eval"}
    assert differing(one, other)["history: eval"] == "records: 2 uninterrupted, 1 interrupted"
    seen = state["objects"]["progress"]["samples_seen"]
    named = f'"samples_seen": {seen - 1}, uninterrupted, "samples_seen": {seen}, interrupted'
    assert differing(one, other)["progress"].split() == named.split()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cuts=0"], "error: --cuts is 0: use 1 or more"),
        (["--ranks=0"], "error: --ranks is 0: use 1 or more"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    idx_data: Path, ask: Ask, request: pytest.FixtureRequest, flags: list[str], message: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
    code, _, printed = ask("--data", idx_data, *flags, program=main)
    assert code == 2
    assert message in printed
    assert len(printed.splitlines()) == 1
