"""The --config file: what it says is what the command line would say."""

from pathlib import Path
from typing import Any

import pytest

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.flag_files import with_files
from hpc.submissions.options import flag_names, submit_flags
from training.config import command_line
from training.config.command_line import preset, recipes
from training.config.model_names import check_model, torchvision_weights
from training.config.train_config import TrainConfig

KNOWN = flag_names(submit_flags())


def settings(*words: str) -> dict[str, Any]:
    """The settings of a command line and of the files that it names, by flag."""
    typed = program.read((submit_flags(),), words, "hpc submit")
    return with_files(typed, KNOWN, {}, lambda others: preset({"data": "x", **others}, KNOWN))


def training(*words: str) -> TrainConfig:
    return program.build(submit_flags(), settings(*words)).program.train


def test_values_are_taken_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("time: 12:00:00\nnodes: 2:4\nconstraint: 0123\nname: on\nlr: 1e-3\nsbatch: [a=1, b=2]\naccount:\n")
    assert settings("--config", str(path), "--lr=2", "--sbatch=c=3") == {
        "time": "12:00:00", "nodes": "2:4", "constraint": "0123", "name": "on", "lr": "2",
        "sbatch": ["a=1", "b=2", "c=3"], "config": str(path),
    }  # fmt: skip


def in_file(directory: Path, text: str, *words: str) -> list[str]:
    """A command line with a file of this text."""
    path = directory / "c.yaml"
    path.write_text(text)
    return [f"--config={path}", *words]


def test_switches_are_true_or_false(tmp_path: Path) -> None:
    options = program.build(
        submit_flags(("a.py",)), settings(*in_file(tmp_path, "wait: true\ndry-run: false\nspares: 1"))
    )
    assert (options.wait, options.dry_run, options.recovery.spares) == (True, False, 1)
    with pytest.raises(UserError, match="wait is 'yes': write true or false"):
        settings(*in_file(tmp_path, "wait: yes"))
    assert {"lr", "data"} - flag_names(submit_flags(("a.py",))).keys() == {"lr"}, (
        "a flag of the training is none of a script's"
    )


# --- recipes ---


@pytest.mark.parametrize("name", ["batch-size", "sbatch", "elastic"])
def test_lists_that_repeat_each_other_are_refused_before_they_are_a_text(name: str, tmp_path: Path) -> None:
    """The file has a kilobyte, but its values would take gigabytes."""
    levels = [f"  - &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 10)]
    text = f"{name}:\n  - &l0 [x, x]\n{''.join(levels)}"
    with pytest.raises(UserError, match=f"{name} is nested: give one value"):
        settings(*in_file(tmp_path, text))


def test_lists_that_are_too_deep_to_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        settings(*in_file(tmp_path, f"sbatch: {'[' * 2_000}"))


def test_every_recipe_is_a_training_that_could_begin() -> None:
    for name in recipes():
        train = training(f"--recipe={name}", "--data=/photos")
        check_model(train.model)
        assert train.weights is None or train.weights in torchvision_weights(train.model)
        assert train != TrainConfig(data="/photos")


def test_a_file_overrides_its_recipe_and_the_command_line_both(tmp_path: Path) -> None:
    text = "recipe: vgg19-20class\nepochs: 3\nfreeze-backbone: false\nlr: 0.5"
    train = training(*in_file(tmp_path, text, "--lr=0.7", "--data=/photos"))
    assert (train.model, train.epochs, train.freeze_backbone, train.lr) == ("vgg19", 3, False, 0.7)
    other = training(*in_file(tmp_path, text, "--recipe=cifar", "--data=/cifar"))
    assert (other.model, other.epochs) == ("resnet20", 3)


def test_training_that_names_no_data_gets_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "FASHION_MNIST_DIRECTORY", tmp_path)
    assert preset({"epochs": "3"}, KNOWN) == {"data": "fashion-mnist"}
    monkeypatch.setattr(command_line, "FASHION_MNIST_DIRECTORY", tmp_path / "none")
    train = program.build(submit_flags(), preset({"epochs": "3"}, KNOWN) | {"epochs": "3"}).program.train
    assert (train.data, train.epochs, train.batch_size) == ("digits", 3, 64)
    assert preset({"data": "x"}, KNOWN) == preset({"synthetic": True}, KNOWN) == {}
    assert "data" not in preset({"recipe": "imagenet-resnet50"}, KNOWN)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--recipe=cifr", "--recipe is 'cifr', which is not known: use cifar"),
        ("--recipe=zzz", "--recipe is 'zzz', which is not known: use cifar, digits, fashion-mnist, "),
        ("--config=c.yaml", "--config c.yaml cannot set 'epoch': did you mean epochs"),
    ],
)
def test_unknown_recipes_and_flags_are_refused(
    flag: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text("epoch: 3")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        settings(flag, "--data=x")
