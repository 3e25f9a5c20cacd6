"""What is put around a model for its training does what it says, and changes nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.trainings import needs_compiler, trainer_with
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn.parallel import DistributedDataParallel

from training.config.train_config import TrainConfig
from training.engine.trainer import Trainer
from training.models.parallel import compile_training, wrap_for_training
from training.runtime.process_group import ProcessGroup, SharedError


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    """Of the first batch, as the ranks have exchanged them."""
    batch = trainer.data.train[next(trainer.schedule.requests(0, 0, 0, 1))]
    trainer.stepper._loss(batch.images, batch.labels, None)[0].backward()  # noqa: SLF001
    return [parameter.grad for parameter in trainer.state.model.parameters() if parameter.grad is not None]


def test_compressed_gradients_are_rounded_to_bfloat16(group: ProcessGroup, idx_data: Path, tmp_path: Path) -> None:
    trainer = trainer_with(group, idx_data, tmp_path / "exact")
    exact = gradients(trainer)
    trainer = trainer_with(group, idx_data, tmp_path / "rounded", compress_gradients="bf16")
    trainer.stepper.wrapped = wrap_for_training(trainer.state.model, trainer.config, replace(group, world_size=2))
    rounded = gradients(trainer)
    assert not any(torch.equal(value, value.bfloat16().float()) for value in exact)
    assert all(torch.equal(value, other.bfloat16().float()) for value, other in zip(rounded, exact, strict=True))


def test_images_of_one_channel_have_the_strides_of_channels_last(
    group: ProcessGroup, idx_data: Path, tmp_path: Path
) -> None:
    trainer = trainer_with(group, idx_data, tmp_path / "run", model="resnet20")
    channels, size = trainer.data.channels, trainer.data.size
    images = torch.randint(256, (2, channels, size, size), dtype=torch.uint8)
    found = trainer.stepper.preprocess(images)
    assert channels == 1
    # torch.contiguous leaves images of one channel as they are; cuDNN then computes gradients that DDP must copy.
    assert found.stride() == found.clone().to(memory_format=torch.channels_last).stride()
    assert found.stride()[1] == 1
    assert found.reshape(2, -1).argsort().equal(images.reshape(2, -1).float().argsort()), "the same images"


def test_rank_0_broadcasts_buffers_in_each_step_only_if_the_forward_pass_may_read_them(
    group: ProcessGroup, idx_data: Path, tmp_path: Path
) -> None:
    trainer = trainer_with(group, idx_data, tmp_path / "run", model="resnet20")
    assert trainer.stepper.wrapped is trainer.state.model, "a single rank has nothing to reduce"
    ranks = replace(group, world_size=2)
    ddp = wrap_for_training(trainer.state.model, trainer.config, ranks)
    assert isinstance(ddp, DistributedDataParallel)
    assert not ddp.will_sync_module_buffers()
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    model.register_buffer("calls", torch.zeros(()))
    wrapped = wrap_for_training(model, TrainConfig(data="x"), ranks)
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.will_sync_module_buffers()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in /tmp may be compiled for another instruction set, with which the gradients are wrong."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("empty_cache")
def test_a_compiled_model_has_the_same_names_and_gradients_and_is_evaluated_as_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    names, images = list(model.state_dict()), torch.randn(3, 4)
    model(images).square().sum().backward()
    [expected, _] = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    evaluated = model.eval()(images)
    compile_training(model, cores=1)
    counters.clear()
    assert torch.equal(model(images), evaluated)
    assert not counters["frames"], "an evaluation compiles nothing"
    model.train().zero_grad()
    model(images).square().sum().backward()
    assert counters["frames"]["ok"] == 1
    torch.testing.assert_close(model[0].weight.grad, expected)
    assert list(model.state_dict()) == names


@pytest.mark.usefixtures("empty_cache")
def test_a_compiler_that_is_missing_is_said_in_one_line(group: ProcessGroup, idx_data: Path, tmp_path: Path) -> None:
    trainer = trainer_with(group, idx_data, tmp_path / "run", compile=True)
    without = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    with without, pytest.raises(SharedError, match=r"--compile does not work here: .*no-such-compiler"):
        trainer.stepper.warm_up(1, 12)


@pytest.mark.parametrize(("cores", "processes"), [(3, 3), (64, 32), (0, 1)])
def test_a_rank_compiles_in_no_more_processes_than_it_has_cores(cores: int, processes: int) -> None:
    with inductor.patch(compile_threads=32):
        compile_training(nn.Linear(2, 2), cores)
        assert inductor.compile_threads == processes
