"""What holds a training up: operations for which the host waits for the GPU, snapshots and checkpoints.

Waits are counted in steps that also log metrics (torch.cuda.set_sync_debug_mode). A save is measured by windows of
steps that begin with one, against windows beside them that do not; and as the trainer measures it, which
`--snapshot-every auto` goes by. Batches that the GPU itself makes from images in its memory are measured alone, too.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.part import Found, Goal, Row, data_directory, device, goal, on_gpu, synchronize
from benchmarks.speed.loops import Case
from benchmarks.speed.our_loop import our_trainer
from hpc.run.nodedir import NodeDir
from training.config.dataset_layout import check_data, resolve_data
from training.config.rules import INTERVAL_WORDS
from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchSchedule
from training.data.build import load_data, moved
from training.data.loader import load_device_batches
from training.engine.trainer import Trainer
from training.runtime.determinism import configure
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import rank_info_from

_AUTO = INTERVAL_WORDS["snapshot_every"]["auto"]
# Saves are called here.
_BY_HAND: dict[str, Any] = {"snapshot_every": "1000000", "checkpoint_every": "1000000", "log_every": 5}
# The first saves into each of two files provide memory.
_UNCOUNTED = 2
_CHECKPOINT_MS, _SNAPSHOT_SHARE = 20, 0.01
_SIDE, _BATCH = 28, 512
CASES: tuple[tuple[Case, dict[str, Any]], ...] = (
    (Case(model="resnet50", image_size=224, batch_size=256), {}),
    (
        Case(model="vit_b_16", image_size=224, batch_size=128, optimizer="adamw"),
        {"ema_decay": 0.999, "clip_grad_norm": 1.0, "mixup": 0.2},
    ),
    (Case(model="resnet18", image_size=32, batch_size=512), {}),
)
SMALL: tuple[tuple[Case, dict[str, Any]], ...] = (
    (Case(model="resnet20", image_size=32, batch_size=8, amp="none"), {}),
)


def stalls_of(trainer: Trainer, seconds: float, rounds: int) -> Row:
    """Measure one model's waits and saves, in so many windows of each kind."""
    trainer.stepper.warm_up(trainer.data.channels, trainer.data.size)
    trainer.resume()
    steps = trainer.steps()
    advance(steps, 6)
    waits = count_waits(steps, 2 * trainer.config.log_every)
    window = max(4, int(seconds / (advance(steps, 4) / 4)))
    writer = trainer.saver.writer
    saves: dict[str, Callable[[], object]] = {
        "snapshot": partial(trainer.saver.save, durable=False),
        "checkpoint": trainer.save,
    }
    row: Row = {"model": trainer.config.model, "step_ms": 0.0, "waits": len(waits), "where": ", ".join(sorted(waits))}
    for name, save in saves.items():
        plain, saving = list[float](), list[float]()
        for _ in range(rounds + _UNCOUNTED):
            plain.append(advance(steps, window))
            saving.append(advance(steps, window, save))
            writer.wait()
        plain, saving = plain[_UNCOUNTED:], saving[_UNCOUNTED:]
        row["step_ms"] = round(median(plain) / window * 1000, 2)
        lost = median(one - other for one, other in zip(saving, plain, strict=True))
        row |= {f"{name}_ms": round(lost * 1000, 1), f"{name}_measured_ms": round(writer.cost_seconds * 1000, 1)}
    return row


def advance(steps: Iterator[object], count: int, save: Callable[[], object] | None = None) -> float:
    """Make some steps, after a save if there is one, and return the seconds."""
    began = synchronize()
    if save:
        save()
    for _ in islice(steps, count):
        pass
    return synchronize() - began


def count_waits(steps: Iterator[object], count: int) -> set[str]:
    """Return the lines of code at which the host waits for the GPU in these steps."""
    if not on_gpu():
        advance(steps, count)
        return set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in islice(steps, count):
            pass
        torch.cuda.set_sync_debug_mode("default")
    return {
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if "synchronizing" in str(warning.message)
    }


def batches_on_device(count: int) -> Row:
    """Measure how long batches of Fashion-MNIST take that the device itself makes; print the slowest operations."""
    config = TrainConfig(data=data_directory(), flip="on", random_erasing=0.25, val_split=0.0)
    layout = check_data(resolve_data(config.data))
    source = moved(load_data(config, layout, _SIDE), device()).train
    schedule = BatchSchedule(samples=len(source), batch_size=_BATCH, epochs=10**6, seed=config.seed)
    requests = schedule.requests(0, 0, 0, 1)
    with load_device_batches(device(), source, requests, 0) as batches:
        advance(batches, 4)
        seconds = advance(batches, count)
        waits = count_waits(batches, count)
        with torch.profiler.profile() as profile:
            advance(batches, count)
    print(profile.key_averages().table("self_cpu_time_total", row_limit=12, max_name_column_width=50))
    return {
        "model": "batches of Fashion-MNIST", "step_ms": round(seconds / count * 1000, 2), "waits": len(waits),
        "where": ", ".join(sorted(waits)),
    }  # fmt: skip


def goals(row: Row) -> list[Goal]:
    """Return the goals of one model."""
    interval = max(_AUTO["seconds"], row["snapshot_measured_ms"] / 1000 / _AUTO["max_overhead"])
    share = round(max(0.0, row["snapshot_ms"]) / 1000 / interval, 4)
    checkpoint, name = row["checkpoint_ms"], row["model"]
    return [
        goal(f"{name}: waits for the GPU", row["waits"], "0", met=row["waits"] == 0),
        goal(f"{name}: a checkpoint", checkpoint, f"<= {_CHECKPOINT_MS} ms", met=checkpoint <= _CHECKPOINT_MS),
        goal(f"{name}: snapshots, auto", share, f"<= {_SNAPSHOT_SHARE}", met=share <= _SNAPSHOT_SHARE),
    ]


def measure(*, small: bool) -> Found:
    """Measure one model after the other."""
    configure(TrainConfig(synthetic=True))
    group = connect(rank_info_from(os.environ))
    rows = []
    for case, flags in SMALL if small else CASES:
        # Snapshots in memory, as in a run; a checkpoint's stall does not depend on the disk.
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # a new directory in it
            node = NodeDir(Path(directory) / "node")
            node.path.mkdir(mode=0o700)
            trainer = our_trainer(case, group, Path(directory) / "run", node, **_BY_HAND, **flags)
            rows.append(stalls_of(trainer, 0.1 if small else 1.0, 1 if small else 5))
            trainer.finish_writing()
    disconnect()
    found = [each for row in rows for each in goals(row)]
    made = batches_on_device(4 if small else 50)
    waits = made["waits"]
    return [*rows, made], [*found, goal(f"{made['model']}: waits for the GPU", waits, "0", met=waits == 0)]
