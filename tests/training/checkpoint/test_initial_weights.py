"""Initial weights: files, names, heads and frozen parameters."""

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainings import Starter, final
from torch import Tensor, nn
from torchrelay.checkpoint_files import list_checkpoints

from hpc.base.errors import UserError
from hpc.commands.start.submit import main as submit
from training.checkpoint.initial_weights import read_weights, select_weights
from training.config import model_names
from training.config.model_names import cache_directory, models_of, resolve_weights, torchvision_weights
from training.config.train_config import TrainConfig
from training.models.factory import build_model, head_names, last_layer_names

FLAGS = ("--model=resnet20", "--epochs=2", "--batch-size=40", "--ema-decay=0.5", "--val-split=0")
# What no step changes, so that the weights at the end are those of the beginning.
STILL = ("--lr=1e-30", "--weight-decay=0")


def resnet20(classes: int = 3) -> nn.Module:
    return build_model(TrainConfig(data="x", model="resnet20", seed=5), classes=classes, channels=1, size=12)


def make_weights(path: Path, classes: int = 3) -> dict[str, Tensor]:
    """A file of ResNet-20 weights that differ from those of the default seed."""
    torch.manual_seed(7)
    model = resnet20(classes)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for values in (module.running_mean, module.running_var, module.bias):
                    nn.init.uniform_(values, 1, 2)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)
    return weights


# --- files ---


def test_a_training_begins_with_the_weights_of_a_file(start: Starter, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    weights = make_weights(path)
    expected = {name: value for name, value in weights.items() if "running" not in name and "tracked" not in name}
    training = start.complete(*FLAGS, *STILL, f"--weights={path}", world_size=2)
    assert f"beginning with {path}\n" in training.output()
    assert all(torch.equal(final(training.run_dir)[name], value) for name, value in expected.items())
    state = load_file(list_checkpoints(training.run_dir / "checkpoints")[0] / "state.safetensors")
    assert all(torch.equal(state[f"model/{name}"], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("key", "prefix", "source"),
    [
        ("", "model._orig_mod.module.", "model.module."),
        ("state_dict", "net.", "state_dict, net."),
        ("trainer.weights", "", "trainer.weights"),
    ],
)
def test_weights_are_found_under_the_keys_and_prefixes_of_other_programs(
    tmp_path: Path, key: str, prefix: str, source: str
) -> None:
    path, weights = tmp_path / "w.pth", make_weights(tmp_path / "plain.pth")
    content: dict[str, Any] = {prefix + name: value for name, value in weights.items()}
    for part in reversed(key.split(".") if key else []):
        content = {part: content, "epoch": 3}
    torch.save(content, path)
    fitting, new, used = select_weights(read_weights(path), resnet20(), path)
    assert (new, used, fitting.keys()) == ([], source, weights.keys())
    assert all(torch.equal(fitting[name], value) for name, value in weights.items())


class Accuracy(float):
    """A class that only the program that saved a checkpoint knows."""


def of_timm(weights: dict[str, Tensor], averaged: dict[str, Tensor]) -> dict[str, Any]:
    """A checkpoint as timm's train.py writes it."""
    return {"epoch": 3, "arch": "resnet20", "state_dict": weights, "state_dict_ema": averaged, "metric": Accuracy(0.5)}


def of_torchvision(weights: dict[str, Tensor], averaged: dict[str, Tensor]) -> dict[str, Any]:
    """A checkpoint as torchvision's references/classification/train.py writes it."""
    average = torch.optim.swa_utils.AveragedModel(resnet20())
    average.module.load_state_dict(averaged)
    return {"model": weights, "model_ema": average.state_dict(), "epoch": 3}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("make", [of_timm, of_torchvision])
def test_checkpoints_of_timm_and_torchvision_give_their_averaged_weights(
    tmp_path: Path, make: Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Any]], is_old: bool
) -> None:
    path, weights = tmp_path / "w.pth", make_weights(tmp_path / "plain.pth")
    averaged = {name: value + 1 for name, value in weights.items()}
    content = make(weights, averaged) | {"args": argparse.Namespace(model="resnet20", output=Path("out"))}
    if is_old:  # before torch 1.6
        content = make(weights, averaged) | {"metric": 0.5, "args": argparse.Namespace(model="resnet20")}
    torch.save(content, path, _use_new_zipfile_serialization=not is_old)
    fitting, _, source = select_weights(read_weights(path), resnet20(), path)
    assert "ema" in source
    assert all(torch.equal(fitting[name], value) for name, value in averaged.items())


def test_a_head_of_another_size_starts_random_with_a_message(start: Starter, tmp_path: Path) -> None:
    weights = make_weights(tmp_path / "w.pth", classes=1000)
    training = start.complete(*FLAGS, *STILL, f"--weights={tmp_path / 'w.pth'}")
    assert f"beginning with {tmp_path / 'w.pth'}, but a new fc" in training.output()
    found = final(training.run_dir)
    assert found["fc.weight"].shape == (3, 64)
    config = TrainConfig(data="x", model="resnet20")
    of_the_seed = build_model(config, classes=3, channels=1, size=12).state_dict()
    assert torch.equal(found["fc.weight"], of_the_seed["fc.weight"])
    assert torch.equal(found["features.0.weight"], weights["features.0.weight"])


def test_a_resumed_run_does_not_need_the_file(start: Starter, tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    make_weights(path)
    assert start(*FLAGS, f"--weights={path}", "--fault=stop@3:0").wait() == [0]
    path.unlink()
    resumed = start.complete(*FLAGS, f"--weights={path}")
    assert "beginning with" not in resumed.output()


class Harm:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("harm").write_text, ("done",))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"a.weight": torch.zeros(3), "args": Harm()}, "which cannot be read (it holds more than tensors): give"),
        (nn.Linear(2, 2), "which holds no tensors by name: give a state_dict"),
        (b"neither", "which cannot be read ("),
        (
            {"features.0.weight": torch.zeros(16, 1, 3, 3)},
            "shape for 37 of the layers, such as features.1.weight, but others, such as features.0.weight",
        ),
        (
            {"features.0.weight": torch.zeros(16, 3, 3, 3)},
            "such as features.0.weight, which has shape [16, 3, 3, 3] instead of [16, 1, 3, 3]",
        ),
    ],
)
def test_an_unsuitable_file_is_refused_in_one_line(
    start: Starter, tmp_path: Path, content: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "w.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    refused = start(*FLAGS, f"--weights={path}", world_size=2)
    assert refused.wait() == [2, 2]
    assert f"error: rank 0: --weights is {path}, which " in refused.output()
    assert reason in refused.output()
    assert "Traceback" not in refused.output()
    assert not Path("harm").exists()


# --- names ---


def test_names_and_urls_are_those_of_torchvision() -> None:
    from torchvision import models

    for name in models_of("torchvision"):
        members = models.get_model_weights(name).__members__
        assert torchvision_weights(name) == {key: member.value.url for key, member in members.items()}


def test_the_cache_is_the_directory_of_torch_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("TORCH_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert Path(torch.hub.get_dir()) / "checkpoints" == cache_directory()
        monkeypatch.delenv(variable)
    assert Path(torch.hub.get_dir()) / "checkpoints" == cache_directory()


def test_a_name_stands_for_an_intact_file_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    digest = hashlib.sha256(b"weights").hexdigest()[:8]
    url = f"https://download.pytorch.org/models/resnet34-{digest}.pth"
    monkeypatch.setattr(model_names, "torchvision_weights", lambda _: {"IMAGENET1K_V1": url})
    path = cache_directory() / f"resnet34-{digest}.pth"
    command = f"where there is internet, type curl --create-dirs -fLo {path} {url}"
    with pytest.raises(UserError) as missing:
        resolve_weights("resnet34", "IMAGENET1K_V1")
    assert str(missing.value) == f"--weights IMAGENET1K_V1 of resnet34 is not in {path.parent}: {command}"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weigh")
    with pytest.raises(UserError) as torn:
        resolve_weights("resnet34", "IMAGENET1K_V1")
    assert str(torn.value) == f"--weights IMAGENET1K_V1 of resnet34 is damaged: {command}"
    path.write_bytes(b"weights")
    for name in ("IMAGENET1K_V1", "ResNet34_Weights.IMAGENET1K_V1"):
        assert resolve_weights("resnet34", name) == path


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        ("resnet34", "V1", "--weights is 'V1', but resnet34 has IMAGENET1K_V1, DEFAULT: use that, or a file"),
        ("resnet20", "DEFAULT", "--weights is 'DEFAULT', but torchvision has none for resnet20: give a file"),
        (
            "resnet34",
            "./w.pth",
            "--weights is ./w.pth, which does not exist: give a file, or a name of torchvision's weights",
        ),
    ],
)
def test_a_submission_refuses_missing_weights(
    capsys: pytest.CaptureFixture[str], idx_data: Path, model: str, name: str, message: str
) -> None:
    flags = ["--cluster=local", "--dry-run", f"--data={idx_data}", f"--model={model}", f"--weights={name}"]
    assert submit(flags) == 2
    assert capsys.readouterr().err == f"hpc submit: {message}\n"


def test_a_submission_finds_weights_without_torch_and_hands_the_nodes_a_path(idx_data: Path, tmp_path: Path) -> None:
    (tmp_path / "w.pth").touch()
    code = (
        "import sys; from hpc.base import program; from hpc.submissions.options import submit_flags; "
        "from hpc.programs.program_kinds import program_of_run; "
        "from hpc.submissions.plan import plan; "
        "parsed = program.parse(submit_flags(), sys.argv[1:], 'x'); "
        "print(program_of_run(plan(parsed)[1]).train.weights, {'torch', 'torchvision'} & set(sys.modules))"
    )
    flags = ["--cluster=local", f"--data={idx_data}", "--weights=./w.pth"]
    argv = [sys.executable, "-c", code, *flags]
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        argv, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": root, "PATH": ""}, check=True
    )
    assert done.stdout == f"{tmp_path / 'w.pth'} set()\n"


# --- heads ---


@pytest.mark.parametrize(
    ("name", "head", "last"),
    [
        ("resnet18", "fc", "fc"),
        ("vgg11", "classifier", "classifier.6"),
        ("squeezenet1_1", "classifier", "classifier.1"),
        ("vit_b_32", "heads", "heads.head"),
    ],
)
def test_the_head_is_what_holds_the_last_layer(name: str, head: str, last: str) -> None:
    from torchvision import models

    with torch.device("meta"):
        model = models.get_model(name, num_classes=7)
    assert (head_names(model), last_layer_names(model)) == ({head}, (last,))


# --- freezing ---


def test_frozen_parameters_do_not_change_and_have_no_optimizer_state(start: Starter, tmp_path: Path) -> None:
    weights = make_weights(tmp_path / "w.safetensors")
    flags = (
        *FLAGS,
        f"--weights={tmp_path / 'w.safetensors'}",
        "--freeze-backbone",
        "--weight-decay=0.1",
        "--clip-grad-norm=1",
    )
    run = start.complete(*flags, world_size=2).run_dir
    state = load_file(list_checkpoints(run / "checkpoints")[0] / "state.safetensors")
    for prefix in ("model/", "ema/"):
        changed = {name for name, value in weights.items() if not torch.equal(state[prefix + name], value)}
        assert changed == {"fc.weight", "fc.bias"}, "batch statistics stay too"
    assert {name for name in state if name.startswith("optimizer/")} == {
        "optimizer/state/0/momentum_buffer",
        "optimizer/state/1/momentum_buffer",
    }


# --- the small residual networks ---


@pytest.mark.parametrize(("depth", "weights"), [(20, 0.27), (56, 0.85), (110, 1.73)])
def test_a_small_residual_network_has_the_layers_and_weights_of_the_paper(depth: int, weights: float) -> None:
    # In millions, of table 6.
    model = build_model(TrainConfig(data="x", model=f"resnet{depth}"), classes=10, channels=3, size=32)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == weights
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
