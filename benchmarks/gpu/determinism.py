"""What `--deterministic` gives and costs: do two processes compute the same gradients, and how fast are the steps?

Each model and mode runs in processes of its own, because libraries read their settings once. The modes take turns.
One rank: what NVLS and rings cost between GPUs is not seen here.
"""

import hashlib
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Literal

import torch
from torch.nn import functional

from benchmarks.gpu.part import Found, Goal, Row, device, goal, same_bits, synchronize
from benchmarks.harness import Sample, take_turns
from training.config.train_config import TrainConfig
from training.engine.optim import make_optimizer
from training.models.factory import autocast, build_model
from training.runtime.determinism import configure, configure_attention, operation_without_kernel

Mode = Literal["off", "warn", "error"]
MODES: tuple[Mode, ...] = ("off", "warn", "error")
# Name, batch size, image size.
MODELS = (("resnet50", 128, 224), ("vit_b_16", 64, 224), ("mobilenet_v3_large", 128, 224), ("vgg11", 64, 224))
SMALL, SMALL_MODES = (("resnet20", 4, 32),), MODES[1:2]
ROUNDS = 2
_PRICE = 0.9


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one process found."""

    refused: str
    """The operation without a deterministic kernel, which `error` refuses; empty: there is none."""
    gradients: str
    """Their checksum after two steps."""
    images_per_second: float


def train(name: str, batch_size: int, size: int, mode: Mode, *, small: bool) -> Measured:
    """Train for some seconds on one batch."""
    config = TrainConfig(
        synthetic=True, model=name, image_size=size, amp="none" if small else "bf16", deterministic=mode
    )
    configure(config)
    model = build_model(config, classes=1000, channels=3, size=size)
    configure_attention(model)
    model = model.to(device()).train()
    optimizer, generator = make_optimizer(config, model), torch.Generator().manual_seed(0)
    images = torch.rand(batch_size, 3, size, size, generator=generator).to(device(), memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch_size,), generator=generator).to(device())
    torch.manual_seed(0)  # dropout

    def step() -> None:
        with autocast(config, device()):
            logits = model(images)
        torch.autograd.backward(functional.cross_entropy(logits.float(), labels))
        optimizer.step()

    try:
        step()
    except RuntimeError as error:
        if operation := operation_without_kernel(str(error)):
            return Measured(refused=operation, gradients="", images_per_second=0.0)
        raise
    # The gradients of both steps: they add up.
    step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.grad.cpu().numpy().tobytes() if parameter.grad is not None else b"")
    began, steps = synchronize(), 0
    while time.perf_counter() - began < (0.2 if small else 1.5):
        optimizer.zero_grad()
        step()
        steps += 1
        # Every step: a queue would grow without limit.
        synchronize()
    speed = steps * batch_size / (time.perf_counter() - began)
    return Measured(refused="", gradients=digest.hexdigest(), images_per_second=round(speed, 1))


def measure(*, small: bool) -> Found:
    """Let all models and modes take turns."""
    found: dict[tuple[str, Mode], list[Measured]] = {}

    def turn(name: str, batch_size: int, size: int, mode: Mode) -> list[Sample]:
        words = [name, str(batch_size), str(size), mode, *(["small"] if small else [])]
        command = [sys.executable, "-m", "benchmarks.gpu.determinism", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        measured = Measured(**json.loads(done.stdout.splitlines()[-1]))
        found.setdefault((name, mode), []).append(measured)
        return [{"images_per_second": measured.images_per_second}]

    modes = SMALL_MODES if small else MODES
    contenders = {
        f"{name} {mode}": partial(turn, name, batch_size, size, mode)
        for name, batch_size, size in (SMALL if small else MODELS)
        for mode in modes
    }
    speeds = {
        name: median(each["images_per_second"] for each in samples)
        for name, samples in take_turns(contenders, ROUNDS).items()
    }
    rows, goals = list[Row](), list[Goal]()
    for (name, mode), measured in found.items():
        same = len({each.gradients for each in measured}) == 1
        share = round(speeds[f"{name} {mode}"] / speeds[f"{name} {modes[0]}"], 3)
        refused = measured[0].refused
        rows.append({
            "model": name, "mode": mode, "refused": refused or None, "same_gradients": None if refused else same,
            "images_per_second": speeds[f"{name} {mode}"], "by_off": share,
        })  # fmt: skip
        if mode == "warn" and not refused:
            goals.append(same_bits(f"{name}: two processes", same))
            goals.append(goal(f"{name}: repeatable by fastest", share, f">= {_PRICE}", met=share >= _PRICE))
    return rows, goals


if __name__ == "__main__":
    model, batch, image_size, chosen, *more = sys.argv[1:]
    [deterministic] = [mode for mode in MODES if mode == chosen]
    print(json.dumps(asdict(train(model, int(batch), int(image_size), deterministic, small=bool(more)))))
