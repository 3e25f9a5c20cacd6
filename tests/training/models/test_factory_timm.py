"""Models of timm train, resume, export and say what they were made for."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from support.trainings import Ask, Starter, final, same
from torch import nn

from hpc.base.errors import UserError
from training.checkpoint.initial_weights import select_weights
from training.config.model_names import check_model, models_of
from training.config.train_config import TrainConfig
from training.engine.optim import decayed_names, layer_scales
from training.inference import export
from training.models.factory import build_model, head_names, input_size, last_layer_names

FLAGS = ("--image-size=32", "--epochs=1", "--batch-size=9", "--num-workers=0", "--log-every=1")


def build(name: str, size: int = 160, **settings: object) -> nn.Module:
    config = TrainConfig(data="x", model=f"timm:{name}", **settings)  # type: ignore[arg-type]  # any of its fields
    return build_model(config, classes=5, channels=3, size=size)


def test_without_timm_the_answer_is_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--model timm:test_vit needs the package timm, .* type .*pip install .*timm"):
        check_model("timm:test_vit")


def test_names_are_those_that_timm_itself_lists() -> None:
    import timm

    assert list(models_of("timm")) == sorted(timm.list_models())
    check_model("timm:test_vit")
    check_model("timm:test_vit.r160_in1k")
    with pytest.raises(UserError, match=r"did you mean .*timm:test_vit"):
        check_model("timm:test_vitt")
    with pytest.raises(UserError, match=r"--model is 'timm:test_vit.no', which timm does not have"):
        build("test_vit.no")


@pytest.mark.parametrize(
    ("name", "head"), [("test_vit", "head"), ("test_resnet", "fc"), ("test_convnext", "head.fc"), ("vgg11", "head.fc")]
)
def test_the_head_has_the_classes_and_may_have_a_hidden_layer(name: str, head: str) -> None:
    with torch.device("meta"):
        model = build(name)
        assert (last_layer_names(model), head_names(model)) == ((head,), {head.partition(".")[0]})
        assert model.get_submodule(head).out_features == 5  # type: ignore[union-attr]
        assert last_layer_names(build(name, head_hidden=7)) == (f"{head}.2",)


@pytest.mark.parametrize(
    "name", ["deit_tiny_distilled_patch16_224", "levit_128s", "volo_d1_224", "repvit_m0_9", "efficientvim_m1"]
)
def test_a_model_with_several_heads_gets_new_ones_and_trains_them_all(name: str) -> None:
    import timm

    layers = set(timm.get_pretrained_cfg(name).classifier)
    with torch.device("meta"):
        model = build(name, size=224, weights="./w.pth", freeze_backbone=True)
        weights = timm.create_model(name, num_classes=9).state_dict()
        several = build(name, size=224, head_hidden=7)
    _, new, _ = select_weights({"": weights}, model, Path("w.pth"))
    assert set(new) == layers
    trained = {key for key, value in model.named_parameters() if value.requires_grad}
    assert trained > {f"{layer}.weight" for layer in layers}
    assert {key.partition(".")[0] for key in trained} == head_names(model)
    assert set(last_layer_names(several)) == {f"{layer}.2" for layer in layers}
    assert {layer_scales(model, 0.5)[f"{layer}.weight"] for layer in layers} == {1}


def test_the_size_is_the_models_own_or_as_asked_for_if_it_takes_it() -> None:
    assert input_size(TrainConfig(data="x", model="timm:test_vit"), 28) == 160
    for name in ("test_vit", "test_resnet"):
        model = build(name, size=64, image_size=64).eval()
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 5)
    with pytest.raises(UserError, match=r"--image-size is 50, which timm:test_vit does not take"):
        build("test_vit", size=50, image_size=50)


def test_layers_and_decay_are_those_of_timm() -> None:
    from timm.optim import param_groups_weight_decay

    for name in ("test_vit", "test_resnet", "test_convnext"):
        model = build(name)
        spared = getattr(model, "no_weight_decay", set)()
        without = {
            id(value) for value in param_groups_weight_decay(model, 0.1, no_weight_decay_list=spared)[0]["params"]
        }
        decayed = decayed_names(model)
        assert {key for key, value in model.named_parameters() if id(value) not in without} == decayed
    # Embeddings, blocks, the head or heads.
    for name, size in (("test_vit", 160), ("deit_tiny_distilled_patch16_224", 224)):
        model = build(name, size=size)
        assert len(set(layer_scales(model, 0.5).values())) == 2 + len(model.blocks)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_training_resumes_exactly_and_its_model_is_exported(
    start: Starter, folder_data: Path, tmp_path: Path, ask: Ask
) -> None:
    name = "timm:test_vit_relpos"  # with buffers that are not in its state
    start.data, flags = folder_data, (f"--model={name}", *FLAGS)
    whole = start.complete(*flags, run="whole").run_dir
    cut = start(*flags, "--fault=stop@2:0", run="cut")
    assert cut.wait() == [0], cut.output()
    start.complete(*flags, "--checkpoint-activations", run="cut")
    assert same(final(whole), final(cut.run_dir))
    card = json.loads((whole / "final" / "model.json").read_text())
    # timm's small ViT was made for these, other than the data's.
    assert (card["model"], card["mean"], card["std"]) == (name, [0.5] * 3, [0.5] * 3)
    code, printed, errors = ask(whole, "--format=torch", f"--output={tmp_path / 'model.pt2'}", program=export.main)
    assert (code, errors) == (0, ""), printed + errors
