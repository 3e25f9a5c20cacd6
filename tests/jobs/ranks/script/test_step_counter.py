"""What counts as a step of a script."""

import gc
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from jobs.ranks.script.step_counter import StepCounter, read_count


@pytest.fixture
def heartbeat(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "local-0")
    handle = StepCounter(path, 3).attach(import_module("torch.optim.optimizer"))
    yield path
    handle.remove()


def make(kind: type[Optimizer] = SGD) -> Optimizer:
    return kind(torch.nn.Linear(2, 2).parameters(), lr=0.1)  # type: ignore[call-arg]


def step(optimizer: Optimizer, batches: int = 1, factor: float = 1.0) -> None:
    weight = optimizer.param_groups[0]["params"][0]
    for _ in range(batches):
        (weight.sum() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulate() -> None:
    optimizer = make()
    for _ in range(7):
        step(optimizer, batches=3)


def train_gan() -> None:
    """Five steps of a discriminator for each step of its generator."""
    generator, discriminator = make(), make(AdamW)
    for _ in range(3):
        for _ in range(5):
            step(discriminator)
        step(generator)


def step_together() -> None:
    first, second = make(), make(AdamW)
    for _ in range(7):
        step(first)
        step(second)


def step_within() -> None:
    """As ZeroRedundancyOptimizer does, and optimizers that wrap another one."""

    class Outer(SGD):
        inner = make()

        def step(self, *_: object) -> None:  # type: ignore[override]
            self.inner.step()

    optimizer = make(Outer)
    for _ in range(7):
        optimizer.step()


def minimize() -> None:
    """The closure is computed several times a step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(1, 2)).square().sum()
        value.backward()
        return value

    for _ in range(7):
        optimizer.step(loss)


def overflow() -> None:
    """AMP skips the second of eight steps."""
    optimizer, scaler = make(), torch.amp.GradScaler("cpu")
    weight = optimizer.param_groups[0]["params"][0]
    for number in range(8):
        scaler.scale(weight.sum() * (float("inf") if number == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def compile_step() -> None:
    optimizer = make()
    compiled = torch.compile(lambda: step(optimizer), backend="aot_eager")
    for _ in range(7):
        compiled()


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        (accumulate, 7), (train_gan, 15), (step_together, 7), (step_within, 7), (minimize, 7), (overflow, 7),
        (compile_step, 7),
    ],
)  # fmt: skip
def test_one_iteration_is_one_step(heartbeat: str, train: Callable[[], None], steps: int) -> None:
    assert read_count(heartbeat) is None
    train()
    count = read_count(heartbeat)
    assert count is not None
    assert (count.rank, count.steps) == (3, steps)


def test_counted_optimizer_is_freed(heartbeat: str) -> None:
    optimizer = make()
    step(optimizer)
    left = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert left() is None
    assert read_count(heartbeat)


def test_steps_that_a_cuda_graph_records_end_the_count(heartbeat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay of the graph calls no hook, so the count would be wrong. CUDA's answers are the test's."""
    optimizer = make()
    step(optimizer)
    with monkeypatch.context() as recording:
        recording.setattr(torch.cuda, "is_initialized", lambda: True)
        recording.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        step(optimizer)
    step(optimizer)
    assert read_count(heartbeat) is None
