"""Two ranks share one GPU: DDP with streams, snapshots, restoration and exactness where there is one GPU alone.

NCCL refuses two ranks on a device, so they communicate over gloo, which copies through the host: nothing of this says
how fast NCCL is, nor how it adds up. A training that is killed twice, restored from a snapshot and from a checkpoint,
must end with the bits of one that was left alone.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch import distributed

from benchmarks.gpu.part import Found, Row, data_directory, device, same_bits
from hpc.run.events.history import History
from hpc.run.events.kinds import TrainStarted
from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir
from training.config.train_config import TrainConfig
from training.engine.launch import make_trainer
from training.runtime.determinism import configure
from training.runtime.fault_injection import NO_FAULT, parse_fault
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext, rank_info_from
from training.verify_resume.compare import compare_runs
from training.verify_resume.local_launch import prepare_server, start_ranks, wait_for_ranks

RANKS = 2
_TIMEOUT, _GRACE_SECONDS = timedelta(minutes=2), 10.0


def training(data: str, *, small: bool) -> TrainConfig:
    """Return what both trainings have in common."""
    if small:
        return TrainConfig(
            data=data, model="small-cnn", batch_size=64, epochs=1, ema_decay=0.9, snapshot_every="3",
            checkpoint_every="5",
        )  # fmt: skip
    return TrainConfig(
        data=data, model="resnet20", batch_size=512, epochs=2, amp="bf16", ema_decay=0.99, clip_grad_norm=1.0,
        mixup=0.2, random_erasing=0.5, snapshot_every="5", checkpoint_every="40",
    )  # fmt: skip


def train(config: TrainConfig, run: str, attempt: int, fault: str) -> None:
    """Train as one rank, and end this process."""
    configure(config)
    distributed.init_process_group("gloo", timeout=_TIMEOUT)
    control = distributed.new_group(backend="gloo", timeout=_TIMEOUT)
    assert isinstance(control, distributed.ProcessGroup)  # noqa: S101  # it is a number for ranks that are not members
    rank = rank_info_from(os.environ)
    group = ProcessGroup(
        rank=rank.rank, local_rank=rank.local_rank, world_size=rank.world_size, control=control, rank_info=rank,
        device=device(), connected_at=time.monotonic(), cores=1, timeout=_TIMEOUT,
    )  # fmt: skip
    context = RunContext(
        config=config, run_dir=RunDir(Path(run)), attempt=attempt, started=time.monotonic(),
        fault=parse_fault(fault) if fault else NO_FAULT, node_dir=NodeDir(Path(f"{run}-node")),
    )  # fmt: skip
    make_trainer(context, group).run()
    # Nothing waits for a rank that is done.
    sys.stdout.flush()
    os._exit(0)


def attempt(config: TrainConfig, run: Path, number: int, fault: str = "") -> list[int | None]:
    """Train on both ranks from the newest state to the end or the fault, and return their exit codes."""
    Path(f"{run}-node").mkdir(exist_ok=True)
    # It trains before the ranks would read arguments.
    instead = partial(train, config, str(run), number, fault)
    return wait_for_ranks(start_ranks([()] * RANKS, Path(f"{run}.log"), instead), _GRACE_SECONDS)


def measure(*, small: bool) -> Found:
    """Train twice and compare."""
    # Ranks are forks of a server that has imported torch, and has not asked for a GPU.
    prepare_server()
    with tempfile.TemporaryDirectory() as directory:
        config = training(data_directory(Path(directory) if small else None), small=small)
        whole, cut = Path(directory) / "whole", Path(directory) / "cut"
        codes = [attempt(config, whole, 1)]
        steps = [7, 11] if small else [60, 130]
        codes += [attempt(config, cut, number, f"step@{step}:{number % RANKS}") for number, step in enumerate(steps, 1)]
        # As on other nodes: what is restored now is a checkpoint.
        shutil.rmtree(f"{cut}-node")
        codes += [attempt(config, cut, 3)]
        if codes[0] != [0, 0] or codes[-1] != [0, 0] or any(-signal.SIGKILL not in code for code in codes[1:-1]):
            logs = "".join(path.read_text()[-4000:] for path in Path(directory).glob("*.log"))
            raise SystemExit(f"a training failed: exit codes {codes}\n{logs}")
        restored = History.load(RunDir(cut)).of(TrainStarted)
        rows: list[Row] = [
            {"part": part.name, "compared": part.compared, "difference": part.difference}
            for part in compare_runs(RunDir(whole), RunDir(cut))
        ]
    same = not any(row["difference"] for row in rows)
    rows += [{"part": "restored from", "compared": event.restored_from} for event in restored]
    return rows, [same_bits("two ranks on one GPU, killed twice", same)]
