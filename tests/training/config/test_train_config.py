"""The flags: what is refused and how, and that ranks read the flags that were submitted."""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.events import script_spec
from support.trainings import make_folder, make_idx

from hpc.base.errors import UserError
from hpc.base.text import flag
from jobs.ranks.rank_program import program_argv
from training.config.classifier_program import ClassifierFlags
from training.config.command_line import rank_options
from training.config.dataset_layout import check_data, resolve_data
from training.config.model_names import models_of
from training.config.rules import parse_interval, without_effect
from training.config.train_config import TrainConfig, size_in_epoch


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data", "", "--data is missing: give a directory, fashion-mnist or digits, or use --synthetic"),
        ("epochs", 0, "--epochs is 0: use 1 or more"),
        (
            "lr_step_epochs",
            "3,2",
            "--lr-step-epochs is '3,2': use a number such as 30, or rising epochs such as 150,225",
        ),
        ("label_smoothing", 1, "--label-smoothing is 1: use 0 or more and less than 1"),
        ("seed", -1, "--seed is -1: use a whole number from 0 to 9223372036854775807"),
        (
            "crop_scale",
            "0,1",
            "--crop-scale is '0,1': use two numbers above 0 and up to 1, the smaller one first, such as 0.08,1",
        ),
        ("eval_crop_pct", "232", "--eval-crop-pct is '232': use a number above 0 and up to 1, such as 0.875"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_flag_and_what_to_use(
    field: str, value: Any, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        TrainConfig(**{"data": "x", field: value})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "bce", "class_weights": "balanced"}, "--loss bce cannot be combined with --class-weights"),
        ({"strategy": "fsdp", "ema_decay": 0.9}, "--strategy fsdp cannot be combined with --ema-decay: leave one out"),
        ({"strategy": "fsdp", "amp": "fp16"}, "--strategy fsdp cannot be combined with --amp fp16"),
        ({"lr": 0.4, "min_lr": 0.5}, "--min-lr is 0.5, more than the highest learning rate: use 0.4 or less"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainConfig(data="x", **settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr_step_epochs": "5"}, ["--lr-step-epochs 5 has no effect: it applies to --lr-scheduler step"]),
        (
            {"early_stopping_patience": 7},
            ["--early-stopping-patience 7 has no effect: there are too few --epochs"],
        ),
        (
            {"decay_norm_and_bias": True, "weight_decay": 0.0},
            ["--decay-norm-and-bias has no effect: --weight-decay is 0"],
        ),
        ({"warmup_epochs": 9.5}, ["--warmup-epochs 9.5 is more than --epochs: --lr is never reached"]),
        ({}, []),
        ({"lr_scheduler": "step", "lr_step_epochs": "5", "lr_gamma": 0.3}, []),
        ({"lr_scheduler": "plateau", "plateau_patience": 2, "lr_gamma": 0.3}, []),
        ({"early_stopping_patience": 6, "decay_norm_and_bias": True}, []),
        ({"epochs": 1}, []),
    ],
)
def test_a_flag_that_changes_nothing_is_named(settings: dict[str, Any], told: list[str]) -> None:
    assert without_effect(TrainConfig(data="x", **settings)) == told


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("500", {"steps": 500}),
        ("30s", {"seconds": 30}),
        ("10m", {"seconds": 600}),
        ("1.5h", {"seconds": 5400}),
    ],
)
def test_checkpoints_are_every_so_many_steps_or_seconds(text: str, every: dict[str, float]) -> None:
    assert parse_interval("checkpoint_every", text) == every
    assert parse_interval("snapshot_every", text) == every


@pytest.mark.parametrize("text", ["", "0", "0s", "10x", "m", "-5", "1e3", "10 m", "1.5"])
def test_any_other_text_is_no_interval(text: str) -> None:
    for field in ("checkpoint_every", "snapshot_every"):
        with pytest.raises(UserError, match=f"{flag(field)} is .*: use .*steps such as 500, or a duration such as 30s"):
            parse_interval(field, text)


def test_snapshots_alone_may_be_automatic_or_off() -> None:
    assert parse_interval("snapshot_every", "off") == {}
    auto = parse_interval("snapshot_every", "auto")
    assert auto["seconds"] == 0.5
    assert auto["max_overhead"] <= 0.01
    for word in ("auto", "off"):
        with pytest.raises(UserError, match=f"--checkpoint-every is '{word}': use steps such as 500"):
            TrainConfig(data="x", checkpoint_every=word)
    with pytest.raises(UserError, match="--snapshot-every is 'never': use auto, off, steps such as 500, or a duration"):
        TrainConfig(data="x", snapshot_every="never")


def test_images_grow_to_the_last_size_in_the_last_epoch() -> None:
    for epochs in range(1, 9):
        config = TrainConfig(data="x", model="resnet20", epochs=epochs, initial_image_size=128)
        sizes = [size_in_epoch(config, 224, epoch) for epoch in range(epochs)]
        assert sizes == sorted(sizes)
        assert sizes[-1] == 224


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(
            data='/data/it\'s a "set" with $HOME, ünicode and\nlines',
            model="resnet50",
            lr=1e-07,
            weight_decay=0.1 + 0.2,
            image_size=160,
            num_workers=0,
            seed=2**63 - 1,
            amp="bf16",
            checkpoint_every="30s",
        ),
        TrainConfig(data="--data", model="-x"),
        TrainConfig(data="{data}", model="{run_dir}", weights="/a {attempt}/{{x}}/{torchrelay_node_dir}"),
        TrainConfig(data="a=b=c", crop="padded", flip="on", optimizer="adamw", sync_bn=True, ema_decay=0.99),
    ],
)
def test_a_rank_reads_the_flags_that_its_run_was_submitted_with(config: TrainConfig, tmp_path: Path) -> None:
    run, memory = tmp_path / "it's a $run", tmp_path / "memory"
    run.mkdir()
    data = tmp_path / "a=b --c"
    data.mkdir()
    program = ClassifierFlags(train=config, recipe="cifar").as_program()
    places = {"run_dir": run, "attempt": 3, "torchrelay_node_dir": memory, "data": data}
    _, _, *argv = program_argv(program, tmp_path, places)
    assert "--resolved" in argv
    options = rank_options(argv)
    assert options.train == (config if config.synthetic else replace(config, data=str(data)))
    assert (options.recipe, options.run_dir, options.attempt, options.node_dir) == ("cifar", run, 3, memory)
    assert ClassifierFlags.of_run(script_spec(program=program, data=config.data)).train == config


def test_flags_of_another_version_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="there is no flag --no-flag") as raised:
        rank_options(["--resolved", "--no-flag=1"])
    assert "\n" not in str(raised.value)


def test_a_rank_that_an_agent_starts_imports_no_libraries_of_the_command_line() -> None:
    code = "import sys; from training import __main__ as rank; code = rank.main(); "
    code += "print(code, sorted({'yaml', 'rich'} & set(sys.modules)))"
    argv = ["--resolved", "--data=nowhere", "--fault=none"]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n", done.stderr
    assert done.stderr.startswith("error: --fault is 'none'")


def test_the_names_of_models_are_those_that_torchvision_itself_lists() -> None:
    from torchvision import models

    assert list(models_of("torchvision")) == sorted(models.list_models(module=models))


def test_idx_files_need_no_test_set(tmp_path: Path) -> None:
    data = make_idx(tmp_path / "data")
    for file in data.glob("t10k-*"):
        file.unlink()
    assert check_data(data).test is None


def test_an_image_without_its_label_file_is_missed(tmp_path: Path) -> None:
    data = make_idx(tmp_path / "data")
    (data / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"which lacks t10k-labels-idx1-ubyte \(or .gz\)"):
        check_data(data)


def test_a_part_in_two_spellings_is_not_chosen_from(tmp_path: Path) -> None:
    data = make_folder(tmp_path / "data", parts=("train", "val", "Validation"), per_class=1)
    with pytest.raises(UserError, match=f"which has {data}/Validation and {data}/val: keep only one of them"):
        check_data(data)


def test_a_class_may_have_the_name_of_a_part(tmp_path: Path) -> None:
    make_folder(tmp_path / "data", parts=("Train",), per_class=1)
    vehicles = (tmp_path / "data" / "Train" / "red").rename(tmp_path / "data" / "Train" / "train").parent
    layout = check_data(vehicles)
    assert (layout.train, layout.val, layout.test) == (vehicles, None, None)


def test_an_empty_part_is_named(tmp_path: Path) -> None:
    data = make_folder(tmp_path / "data", parts=("train",))
    (data / "val").mkdir()
    with pytest.raises(UserError, match=r"/val holds no class directories with images"):
        check_data(data)


def test_fashion_mnist_is_debians_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from training.config import dataset_layout

    monkeypatch.setattr(dataset_layout, "FASHION_MNIST_DIRECTORY", tmp_path / "none")
    with pytest.raises(UserError, match="apt-get install dataset-fashion-mnist, give the directory"):
        resolve_data("fashion-mnist")
    monkeypatch.setattr(dataset_layout, "FASHION_MNIST_DIRECTORY", tmp_path)
    assert resolve_data("fashion-mnist") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve_data("./fashion-mnist") == tmp_path / "fashion-mnist"


def test_data_that_may_not_be_read_are_said_in_one_line() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        data = Path(directory)
        data.chmod(0o755)
        (data / "train").mkdir(mode=0)
        user = os.geteuid()
        try:
            os.seteuid(user or 65534)  # root may read everything
            with pytest.raises(
                UserError, match=rf"--data is {data}: {data}/train cannot be read \(Permission denied\)"
            ):
                check_data(data)
        finally:
            os.seteuid(user)
            (data / "train").chmod(0o755)
