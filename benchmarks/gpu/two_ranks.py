"""Two ranks share one GPU: DDP with streams, snapshots, restoration and exactness where there is one GPU alone.

NCCL refuses two ranks on a device, so they communicate over gloo, which copies through the host: nothing of this says
how fast NCCL is, nor how it adds up. A training that is killed twice, restored from a snapshot and from a checkpoint,
must end with the bits of one that was left alone.
"""

import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not in __all__

from benchmarks.gpu.part import Found, Row, data_directory, device, same_bits
from hpc.run.events.history import History
from hpc.run.events.kinds import TrainStarted
from hpc.run.nodedir import NodeDir
from hpc.run.rundir import RunDir
from training.config.train_config import TrainConfig
from training.config.training_spec import MODULES
from training.engine.launch import make_trainer
from training.runtime.determinism import configure
from training.runtime.fault_injection import NO_FAULT, parse_fault
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext, rank_info_from
from training.verify_resume.compare import compare_runs

RANKS = 2
_TIMEOUT = timedelta(minutes=2)
_FORKSERVER = multiprocessing.get_context("forkserver")


def training(data: str, *, small: bool) -> TrainConfig:
    """Return what both trainings have in common."""
    if small:
        return TrainConfig(
            data=data, model="small-cnn", batch_size=64, epochs=1, ema_decay=0.9, snapshot_every="3",
            checkpoint_every="5",
        )  # fmt: skip
    return TrainConfig(
        data=data, model="resnet20", batch_size=512, epochs=2, amp="bf16", ema_decay=0.99, clip_grad_norm=1.0,
        mixup=0.2, random_erasing=0.5, snapshot_every="5", checkpoint_every="40", static_graph=True,
    )  # fmt: skip


def train(rank: int, port: int, config: TrainConfig, run: str, attempt: int, fault: str) -> None:
    """Train as one rank, in its own process."""
    configure(config)
    store = TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0, timeout=_TIMEOUT)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=_TIMEOUT)
    control = distributed.new_group(backend="gloo", timeout=_TIMEOUT)
    assert isinstance(control, distributed.ProcessGroup)  # noqa: S101  # it is a number for ranks that are not members
    place = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
    info = rank_info_from({name: str(value) for name, value in place.items()})
    group = ProcessGroup(
        rank_info=info,
        device=device(),
        control=control,
        connected_at=time.monotonic(),
        cores=1,
        timeout=_TIMEOUT,
    )
    context = RunContext(
        config=config,
        run_dir=RunDir(Path(run)),
        attempt=attempt,
        started=time.monotonic(),
        fault=parse_fault(fault) if fault else NO_FAULT,
        node_dir=NodeDir(Path(f"{run}-node")),
    )
    make_trainer(context, group).run()
    # Nothing waits for a rank that is done.
    sys.stdout.flush()
    os._exit(0)


def attempt(config: TrainConfig, run: Path, number: int, fault: str = "") -> list[int | None]:
    """Start both ranks from the newest state to the end or the fault. Returns their exit codes."""
    Path(f"{run}-node").mkdir(exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = [
        _FORKSERVER.Process(target=train, args=(rank, port, config, str(run), number, fault)) for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    if fault:
        ranks[int(fault.partition(":")[2])].join()
        for rank in ranks:
            rank.kill()
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


def measure(*, small: bool) -> Found:
    """Train twice and compare."""
    # Ranks are forks of a server that has imported torch, and has not asked for a GPU.
    _FORKSERVER.set_forkserver_preload([*MODULES])
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
            raise SystemExit(f"a training failed: exit codes {codes}")
        restored = History.load(RunDir(cut)).of(TrainStarted)
        rows: list[Row] = [
            {"part": part.name, "compared": part.compared, "difference": part.difference}
            for part in compare_runs(RunDir(whole), RunDir(cut))
        ]
    same = not any(row["difference"] for row in rows)
    rows += [{"part": "restored from", "compared": event.restored_from} for event in restored]
    return rows, [same_bits("two ranks on one GPU, killed twice", same)]
