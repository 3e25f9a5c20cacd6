"""What `--deterministic` and `--tf32` set, and what the state says of the numbers that it was computed with."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torchvision import models

from training.config.train_config import TrainConfig
from training.runtime.determinism import (
    Numerics,
    configure,
    configure_attention,
)
from training.runtime.process_group import ProcessGroup
from training.runtime.rank_device import processor_name

CONFIG = TrainConfig(synthetic=True)
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring"}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored afterwards, whatever is set in between
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("mode", "repeatable", "warns"), [("off", False, False), ("warn", True, True), ("error", True, False)]
)
def test_each_mode_sets_all_libraries(mode: str, repeatable: bool, warns: bool) -> None:
    configure(replace(CONFIG, deterministic=mode))  # type: ignore[arg-type]  # a test's text
    assert torch.backends.cudnn.benchmark is not repeatable
    assert torch.backends.cudnn.deterministic is repeatable
    assert torch.are_deterministic_algorithms_enabled() is repeatable
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
    assert {name: os.environ.get(name) for name in VARIABLES} == (VARIABLES if repeatable else dict.fromkeys(VARIABLES))


def test_what_the_user_has_set_wins_and_tf32_is_a_choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    configure(CONFIG)
    assert os.environ["NCCL_ALGO"] == "Tree"
    assert torch.get_float32_matmul_precision() == "highest"
    configure(replace(CONFIG, tf32=True))
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize(("name", "attends"), [("vit_b_32", True), ("resnet18", False), ("swin_v2_t", False)])
def test_only_fused_attention_makes_missing_kernels_errors(name: str, attends: bool) -> None:
    with torch.device("meta"):
        model = models.get_model(name)
    configure(CONFIG)
    configure_attention(model)
    assert torch.is_deterministic_algorithms_warn_only_enabled() is not attends
    configure(replace(CONFIG, deterministic="off"))
    configure_attention(model)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_state_says_what_has_changed_since_it_was_computed(group: ProcessGroup) -> None:
    numerics = Numerics(CONFIG, group)
    numerics.load_state_dict(numerics.state_dict())
    assert numerics.changes == []
    others = {"torch": "2.0.0", "ranks": 8, "processor": "EPYC", "NCCL_ALGO": "Ring"}
    numerics.load_state_dict(numerics.state_dict() | others)
    ours = torch.__version__
    assert numerics.changes == [
        "ranks 1 instead of 8",
        f"torch {ours} instead of 2.0.0",
        f"processor {processor_name()} instead of EPYC",
        "NCCL_ALGO None instead of Ring",
    ]
