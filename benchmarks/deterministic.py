"""What repeatable sums cost: images per second of one rank's steps, with and without them.

    python benchmarks/deterministic.py --model resnet50 --batch-size 256 --amp bf16

Random images, already on the device: nothing but the model and the optimizer is timed. Three settings: cuDNN may choose
the fastest algorithms of the day (what other trainers do for speed), this trainer's default, and `--deterministic`.
The settings take turns, so that a machine which slows down does so for all of them. Prints a Markdown table.
"""

import os
import platform
import statistics
import time
from dataclasses import dataclass

# cuBLAS reads it when it starts: training.__main__ sets it too.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import tyro
from torch.nn import functional

from training.config.train_config import TrainConfig
from training.engine.launch import make_deterministic
from training.engine.optim import make_optimizer
from training.models.factory import autocast, build_model

SETTINGS = ("fastest", "default", "--deterministic")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to time."""

    model: str = "resnet50"
    batch_size: int = 256
    image_size: int = 224
    amp: str = "bf16"
    steps: int = 50
    """Steps of one measurement."""
    rounds: int = 5
    """Measurements of each setting."""


def use(setting: str) -> None:
    """Set torch up as in one of the settings."""
    make_deterministic(everything=setting == "--deterministic")
    if setting == "fastest":
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.deterministic = False


def images_per_second(options: Options, setting: str, device: torch.device) -> float:
    """Speed of training steps, after a tenth as many that are not timed."""
    use(setting)
    size = options.image_size
    config = TrainConfig(data="none", model=options.model, image_size=size, amp=options.amp)  # type: ignore[arg-type]
    model = build_model(config, classes=1000, channels=3, size=size).to(device).train()
    optimizer = make_optimizer(config, model)
    images = torch.randn(options.batch_size, 3, size, size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (options.batch_size,), device=device)
    warm_up = max(1, options.steps // 10)
    began = 0.0
    for step in range(warm_up + options.steps):
        if step == warm_up:
            synchronise(device)
            began = time.perf_counter()
        with autocast(config, device):
            logits = model(images)
        functional.cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        optimizer.zero_grad()
    synchronise(device)
    return options.steps * options.batch_size / (time.perf_counter() - began)


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(options: Options) -> None:
    """Measure and print."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"torch {torch.__version__}, {name}; {options}\n")
    speeds: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for _ in range(options.rounds):
        for setting, measured in speeds.items():
            measured.append(images_per_second(options, setting, device))
    print("| setting | images/s (median) | least | most | against fastest |\n|---|---|---|---|---|")
    base = statistics.median(speeds["fastest"])
    for setting, measured in speeds.items():
        middle = statistics.median(measured)
        print(f"| {setting} | {middle:.1f} | {min(measured):.1f} | {max(measured):.1f} | {middle / base:.1%} |")


if __name__ == "__main__":
    main(tyro.cli(Options))
