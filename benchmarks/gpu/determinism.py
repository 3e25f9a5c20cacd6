"""What `--deterministic` gives and costs: do two processes compute the same gradients, and how fast are the steps?

Each model and mode runs in processes of its own, because libraries read their settings once. The modes take turns.
One rank: what NVLS and rings cost between GPUs is not seen here.
"""

import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Literal

import torch
import tyro
from torch.nn import functional

from benchmarks.gpu.part import Goal, PartOptions, Row, device, finish, goal, synchronize
from training.config.train_config import TrainConfig
from training.engine.optim import make_optimizer
from training.models.factory import autocast, build_model
from training.runtime.determinism import configure, configure_attention, operation_without_kernel

Mode = Literal["off", "warn", "error"]
MODES: tuple[Mode, ...] = ("off", "warn", "error")
# Name, batch size, image size.
MODELS = (("resnet50", 128, 224), ("vit_b_16", 64, 224), ("mobilenet_v3_large", 128, 224), ("vgg11", 64, 224))
SMALL = (("resnet20", 4, 32),)
SMALL_MODES: tuple[Mode, ...] = ("warn",)
_PRICE = 0.9


@dataclass(frozen=True, kw_only=True)
class Options(PartOptions):
    """What to measure."""

    measure: tuple[str, int, int, Mode] | None = None
    """Of one process: model, batch size, image size and mode."""
    seconds: float = 1.5
    """Of each measurement."""
    rounds: int = 2
    """Processes for each model and mode."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one process found."""

    refused: str
    """The operation without a deterministic kernel, which `error` refuses; empty: there is none."""
    gradients: str
    """Their checksum after two steps."""
    images_per_second: float


def measure(
    name: str, batch_size: int, size: int, mode: Mode, seconds: float, amp: Literal["none", "bf16"]
) -> Measured:
    """Train for some seconds on one batch."""
    config = TrainConfig(synthetic=True, model=name, image_size=size, amp=amp, deterministic=mode)
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
    while time.perf_counter() - began < seconds:
        optimizer.zero_grad()
        step()
        steps += 1
        # Every step: a queue would grow without limit.
        synchronize()
    speed = steps * batch_size / (time.perf_counter() - began)
    return Measured(refused="", gradients=digest.hexdigest(), images_per_second=round(speed, 1))


def compare(options: Options) -> tuple[list[Row], list[Goal]]:
    """All models and modes, in turns."""
    models = SMALL if options.small else MODELS
    found: dict[tuple[str, Mode], list[Measured]] = defaultdict(list)
    modes = SMALL_MODES if options.small else MODES
    for _, (name, batch_size, size), mode in product(range(options.rounds), models, modes):
        flags = ["--measure", name, str(batch_size), str(size), mode, f"--seconds={options.seconds}"]
        command = [sys.executable, "-m", "benchmarks.gpu.determinism", *flags]
        done = subprocess.run(
            [*command, *(["--small"] if options.small else [])], stdout=subprocess.PIPE, text=True, check=True
        )
        found[name, mode].append(Measured(**json.loads(done.stdout.splitlines()[-1])))
    rows, goals = [], []
    for (name, mode), measured in found.items():
        speeds = [each.images_per_second for each in measured]
        same = len({each.gradients for each in measured}) == 1
        base = statistics.median(each.images_per_second for each in found[name, modes[0]])
        share = round(statistics.median(speeds) / base, 3)
        refused = measured[0].refused
        row: Row = {
            "model": name,
            "mode": mode,
            "refused": refused or None,
            "same_gradients": None if refused else same,
        }
        rows.append(row | {"images_per_second": statistics.median(speeds), "by_off": share})
        if mode == "warn" and not refused:
            goals.append(goal(f"{name}: two processes", same, "the same bits", met=same))
            goals.append(goal(f"{name}: repeatable by fastest", share, f">= {_PRICE}", met=share >= _PRICE))
    return rows, goals


def main() -> None:
    """Measure and print."""
    options = tyro.cli(Options)
    if options.small:
        options = replace(options, seconds=0.2)
    if options.measure:
        amp: Literal["none", "bf16"] = "none" if options.small else "bf16"
        print(json.dumps(asdict(measure(*options.measure, options.seconds, amp))))
        return
    finish(options, *compare(options))


if __name__ == "__main__":
    main()
