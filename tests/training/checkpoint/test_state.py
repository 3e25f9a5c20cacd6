"""The saved state is complete: a restored trainer lacks nothing."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainings import Starter, trainer_with
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torchrelay import rank_exchange
from torchrelay.progress_files import Heartbeat, Phase
from torchrelay.saving.objects import capture

from training.checkpoint.saver import Saver
from training.checkpoint.state import _ScalerState
from training.engine.trainer import Trainer
from training.runtime.process_group import ProcessGroup

# These belong to the process. Nothing that is computed depends on them. Many are private: the test looks at every
# attribute that there is, so that it finds a new one, and can name those that it leaves out only by where they are.
NOT_STATE = {
    "context.attempt",  # the number of this process
    "context.started",  # a clock
    "context.heartbeat",  # what the process is doing
    "logger._attempt",
    "logger._ledger",
    "logger._first_step",  # of this process, for TensorBoard
    "logger._tensorboard",  # an open file
    "logger.best",  # a thread
    "logger.metrics",  # a thread, idle
    "totals",  # of the last line of metrics
    "state._parts[loss_meter]._started",  # a clock
    "state._parts[loss_meter]._steps",  # the saved steps were finite
    "state._parts[loss_meter]._finite_steps",
    "state._parts[loss_meter]._timed_images",  # for the speed alone
    "state._parts[loss_meter]._earlier_seconds",  # saved, but the clock goes on
    "state._parts[early_stopping]",  # a clock; saved, but it goes on
    "early_stopping",
    "stepper.wrapped",  # torch's, around the model; its buckets are the same from the first step on (Stepper.warm_up)
    "step_timer",  # clocks
    "stop_consensus",  # clocks; the flags of the boundary before: each rank sets them again
    "saver.checkpoints._saved_at",  # a clock
    "saver.snapshots",  # snapshots change nothing
    "saver.writer",  # a thread, idle, and its memory
}


def leaves(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """All numbers, strings and tensors that are reachable from a value, by path."""
    if path.removeprefix(".") in NOT_STATE or id(value) in seen:
        return
    if isinstance(value, torch.Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, int | float | str | bool | Enum | Path) or value is None:
        yield path, value
    if is_ours(value):
        # An object may be reached in several ways; the first one names it.
        seen.add(id(value))
    for name, item in inside(value):
        yield from leaves(path + name, item, seen)


def is_ours(value: Any) -> bool:
    return type(value).__module__.startswith(("training.", "torchrelay."))


def inside(value: Any) -> list[tuple[str, Any]]:
    """The items of a value, by the rest of their path."""
    if isinstance(value, nn.Module | Optimizer | GradScaler):
        return [(":", value.state_dict())]
    if isinstance(value, Mapping):
        return [(f"[{key}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple | set):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if is_ours(value):
        return [(f".{name}", item) for name, item in vars(value).items()]
    return []


def differing(one: Trainer, other: Trainer) -> set[str]:
    """The paths at which two trainers differ, without what belongs to their processes."""
    first, second = (dict(leaves("", trainer, set())) for trainer in (one, other))
    different = {path for path in first.keys() & second.keys() if not equal(first[path], second[path])}
    return different | (first.keys() ^ second.keys())


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def trained_and_restored(group: ProcessGroup, data: Path, path: Path, **flags: object) -> tuple[Trainer, Trainer]:
    """A trainer after 15 steps, in the middle of an epoch, and a new one that has resumed from its checkpoint."""
    saved, restored = (trainer_with(group, data, path, **flags) for _ in range(2))
    for trainer in (saved, restored):
        trainer.stepper.warm_up(trainer.data.channels, trainer.data.size)
    saved.resume()
    requests = saved.schedule.requests(0, 0, 0, 1)
    for _ in range(15):
        saved.stepper.step(saved.data.train[next(requests)], saved.loss_meter)
        saved.log_if_due()
    save(saved)
    saved.logger.close()
    restored.resume()
    restored.logger.close()
    return saved, restored


HOLDERS = "stepper", "loss_meter", "saver", "corrupt_images", "state", "state.progress", "data"


def test_a_restored_trainer_equals_the_saved_one_and_a_new_attribute_that_is_not_saved_is_found(
    group: ProcessGroup, start: Starter
) -> None:
    """With settings with which everything has a state."""
    flags = {"epochs": 3, "log_every": 4, "amp": "fp16", "ema_decay": 0.9, "optimizer": "adamw", "lr": 0.002}
    flags |= {"model": "shufflenet_v2_x0_5", "image_size": 32}
    saved, restored = trained_and_restored(group, start.data, start.directory / "run", **flags)
    assert saved.state.progress.step == 15
    assert differing(saved, restored) == set()

    def holders(trainer: Trainer) -> list[Any]:
        return [trainer, *(attrgetter(path)(trainer) for path in HOLDERS)]

    for one, other in zip(holders(saved), holders(restored), strict=True):
        for holder, value in ((one, torch.tensor(0.7)), (other, torch.tensor(0.0))):
            object.__setattr__(holder, "momentum_of_the_loss", value)
        [found] = differing(saved, restored)
        assert found.endswith("momentum_of_the_loss")
        for holder in (one, other):
            object.__delattr__(holder, "momentum_of_the_loss")


class CountingHeartbeat(Heartbeat):
    """Counts the beats of each phase."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.beats = Counter[str]()

    def beat(self, phase: Phase, step: int | None = None) -> None:
        super().beat(phase, step)
        self.beats[phase] += 1


def save(trainer: Trainer) -> None:
    """Save a checkpoint."""
    trainer.saver.save(durable=True)
    trainer.saver.writer.wait()


@pytest.mark.parametrize("model", ["resnet20", "mnasnet0_5"])
def test_a_state_is_read_tensor_by_tensor_into_the_memory_where_it_belongs(
    group: ProcessGroup, start: Starter, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    flags = {"model": model, "image_size": 32, "ema_decay": 0.9, "optimizer": "adamw"}
    saved, restored = (trainer_with(group, start.data, start.directory / "run", **flags) for _ in range(2))
    saved.stepper.step(saved.data.train[next(saved.schedule.requests(0, 0, 0, 1))], saved.loss_meter)
    save(saved)
    monkeypatch.setattr(rank_exchange, "_BUCKET_BYTES", 2**12)
    heartbeat, state = CountingHeartbeat(), restored.state
    assert state.ema
    models = {"model": state.model, "ema": state.ema.model}
    places = {name: value.data_ptr() for model in models.values() for name, value in model.state_dict().items()}
    context = replace(restored.context, heartbeat=heartbeat)
    assert Saver(context, state, group, restored.logger).restore()

    expected, found = (capture(trainer.state.objects, 1, group) for trainer in (saved, restored))
    assert found.parts.keys() == expected.parts.keys()
    assert all(torch.equal(part.tensor, expected.parts[name].tensor) for name, part in found.parts.items())
    assert heartbeat.beats == {"start": len(expected.parts)}
    assert {name: value.data_ptr() for model in models.values() for name, value in model.state_dict().items()} == places
    for parameter, values in state.optimizer.state.items():
        assert values["exp_avg"].stride() == parameter.stride()


def test_a_tensor_of_another_shape_is_refused(group: ProcessGroup, start: Starter) -> None:
    """As by another version of torchvision, which the identity of a training does not have."""
    saved, other = (trainer_with(group, start.data, start.directory / "run", model="resnet20") for _ in range(2))
    saved.saver.checkpoints.record(None, due=True)
    save(saved)
    other.state.model.fc = nn.Linear(64, 5)
    with pytest.raises(RuntimeError, match=r"size mismatch for fc.weight: .*torch.Size\(\[3, 64\]\).*\[5, 64\]"):
        other.saver.restore()


def test_the_thread_that_writes_uses_the_gpu_of_its_rank(
    group: ProcessGroup, idx_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, chosen = trainer_with(group, idx_data, tmp_path / "run"), list[tuple[str, torch.device]]()

    def set_device(device: torch.device) -> None:
        chosen.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    second = replace(group, device=torch.device("cuda", 1))
    saver = Saver(trainer.context, trainer.state, second, trainer.logger)
    saver.checkpoints.record(None, due=True)
    saver.save(durable=True)
    saver.writer.wait()
    assert chosen == [("writer_0", second.device)]


def test_the_loss_scale_is_saved_again_as_it_was_restored_before_the_next_step() -> None:
    saved = {"scale": torch.tensor(8.0), "growth_tracker": torch.tensor(36, dtype=torch.int32)}
    scaler = _ScalerState(GradScaler("cpu"))
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved
