"""Whether interrupted trainings end with the same bits, and whether images made on the GPU are the CPU's in every bit.

`training.verify_resume` trains each of several models once in one go and once cut and resumed, all at the same time:
nothing is timed here.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.part import Found, Row, data_directory, device, same_bits
from training.config.dataset_layout import check_data, resolve_data
from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchRequest
from training.data.build import load_data, moved
from training.data.loader import ImageSource, load_device_batches

COMPARED = 64
AUGMENTATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"crop": "none", "flip": "on", "random_erasing": 0.5},
    {"crop": "padded", "flip": "on", "random_erasing": 0.5},
)
_COMMON = ["--cuts=2", "--ranks=1", "--epochs=1", "--checkpoint-every=20", "--log-every=5", "--num-workers=2"]
_BF16 = ["--amp=bf16"]
# Name: the flags of the training. Generated images are 100 steps an epoch.
TRAININGS: dict[str, list[str]] = {
    "resnet50": ["--model=resnet50", "--synthetic", "--batch-size=64", "--image-size=128", *_BF16],
    "resnet20": ["--model=resnet20", "--batch-size=512", "--ema-decay=0.99", "--clip-grad-norm=1", "--flip=on"],
    "vit-b-16": ["--model=vit_b_16", "--synthetic", "--batch-size=32", "--optimizer=adamw", *_BF16],
    "resnet18, fp16": ["--model=resnet18", "--synthetic", "--batch-size=64", "--image-size=64", "--amp=fp16"],
    "resnet20, FSDP": ["--model=resnet20", "--batch-size=512", "--strategy=fsdp", *_BF16],
    "resnet20, compiled": ["--model=resnet20", "--batch-size=512", "--compile", *_BF16],
}
SMALL: dict[str, list[str]] = {"small-cnn": ["--model=small-cnn", "--batch-size=64", "--checkpoint-every=4"]}


def same_images(data: str) -> bool:
    """Return whether images that were made on the device, and copies made ahead, are the CPU's in every bit."""
    size, same = 28, True
    for options in AUGMENTATIONS:
        config = TrainConfig(data=data, val_split=0.0, image_size=size, **options)
        opened = load_data(config, check_data(resolve_data(data)), size)
        there = moved(opened, device())
        requests = [
            BatchRequest(indices=tuple(range(first, COMPARED, 4)), epoch=epoch)
            for first, epoch in enumerate([0, 1, None])
        ]
        same = same and all(_same(opened.train, source, requests) for source in (there.train, opened.train))
    return same


def _same(one: ImageSource, other: ImageSource, requests: list[BatchRequest]) -> bool:
    with load_device_batches(device(), other, requests, 0) as batches:
        pairs = [(one[request], batch) for request, batch in zip(requests, batches, strict=True)]
    return all(torch.equal(a, b.cpu()) for pair in pairs for a, b in zip(*pair, strict=True))


def verify(trainings: dict[str, list[str]], data: str, logs: Path) -> list[Row]:
    """Run `verify_resume` for all of them at once, and return a row for each."""
    running = {}
    for name, flags in trainings.items():
        source = [] if "--synthetic" in flags else [f"--data={data}"]
        command = [sys.executable, "-m", "training.verify_resume", *_COMMON, *source, *flags]
        log = (logs / f"{name}.log").open("w+")
        running[name] = (subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log, time.monotonic())
    rows = []
    for name, (process, log, began) in running.items():
        code = process.wait()
        log.seek(0)
        lines = log.read().strip().splitlines() or ["no output"]
        seconds = round(time.monotonic() - began)
        # Behind it, Python may warn of what the killed processes left.
        said = next((line for line in lines if line.startswith("bit-identical")), lines[-1])
        rows.append({"training": name, "same_bits": code == 0, "said": said, "seconds": seconds})
        if code:
            print(f"--- {name} ---", *lines[-40:], sep="\n")
        log.close()
    return rows


def measure(*, small: bool) -> Found:
    """Compare images, then trainings."""
    with tempfile.TemporaryDirectory() as directory:
        data = data_directory(Path(directory) if small else None)
        same = same_images(data)
        rows = verify(SMALL if small else TRAININGS, data, Path(directory))
    goals = [same_bits("images made on the GPU are the CPU's", same)]
    return rows, goals + [same_bits(f"resumed: {row['training']}", row["same_bits"]) for row in rows]
