"""This trainer, as the benchmarks of speed use it: its flags for a case, and its steps one by one."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.speed.loops import LR, WEIGHT_DECAY, Case
from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir
from training.config.train_config import TrainConfig
from training.engine.launch import make_trainer
from training.engine.trainer import Trainer
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext


def ours(case: Case, group: ProcessGroup, run_dir: Path) -> Iterator[None]:
    """Make steps of this trainer, on generated images, JPEGs or packed images."""
    trainer = our_trainer(case, group, run_dir)
    trainer.stepper.warm_up(trainer.data.channels, trainer.data.size)
    trainer.resume()
    return trainer.steps()


def our_trainer(
    case: Case, group: ProcessGroup, run_dir: Path, node_dir: NodeDir | None = None, **flags: Any
) -> Trainer:
    """Make this trainer, with other flags if they are given."""
    config = our_config(case, group.world_size, **flags)
    context = RunContext(config=config, run_dir=RunDir(run_dir), attempt=1, started=time.monotonic(), node_dir=node_dir)
    return make_trainer(context, group)


def our_config(case: Case, world_size: int, **flags: Any) -> TrainConfig:
    """Return the flags of this trainer for a case."""
    source = case.packed or case.folder
    return TrainConfig(
        synthetic=not source, data=source, data_on_device="off" if source else "auto",
        model=case.model, image_size=case.image_size, batch_size=case.batch_size * world_size, amp=case.amp,
        optimizer=case.optimizer, lr=LR, weight_decay=WEIGHT_DECAY, epochs=10**6, val_split=0.0,
        num_workers=case.workers if source else 0, **flags,
    )  # fmt: skip
