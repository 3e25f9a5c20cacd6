"""Starts ranks on this machine without torchrun, as forks of a server that has imported torch already.

A training then starts within a fraction of a second; `verify_resume` and the tests start dozens of them.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGKILL

from hpc.base.transport import pick_port
from hpc.run.spec_file import LIBRARIES
from training.config.classifier_program import TORCHVISION

_FORKSERVER = multiprocessing.get_context("forkserver")
_MODULES = (
    "training.__main__", "training.config.command_line", "training.engine.launch", "torch.utils.tensorboard",
    *LIBRARIES, *TORCHVISION,
)  # fmt: skip


def prepare_server() -> None:
    """Have the server import the ranks' modules before it starts a rank, and give ranks one thread, like torchrun."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _FORKSERVER.set_forkserver_preload(list(_MODULES))


def start_ranks(
    argvs: Sequence[Sequence[str]], log: Path, prepare: Callable[[], None] | None = None
) -> list[BaseProcess]:
    """Start a rank for each list of arguments. The output of all ranks goes to the file `log`.

    Each rank calls `prepare`, if there is one, before it trains.
    """
    # `pick_port` avoids ports that the kernel gives to connections, since rank 0 listens only a second later.
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(pick_port())}
    environment |= {"WORLD_SIZE": str(len(argvs)), "LOCAL_WORLD_SIZE": str(len(argvs))}
    ranks: list[BaseProcess] = []
    for rank, argv in enumerate(argvs):
        place = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = _FORKSERVER.Process(target=_run_rank, args=(list(argv), place, str(log), prepare))
        process.start()
        ranks.append(process)
    return ranks


def wait_for_ranks(ranks: Sequence[BaseProcess], grace_seconds: float) -> list[int | None]:
    """Wait until all ranks have ended or one has failed, then kill the others, and return the exit codes by rank.

    The others would wait minutes for the failed rank. They are killed at once if a rank died of SIGKILL, else after
    `grace_seconds`, the time for their error messages. A rank that is killed here has the code None.
    """
    try:
        while (running := [rank for rank in ranks if rank.exitcode is None]) and not any(r.exitcode for r in ranks):
            wait([rank.sentinel for rank in running])
        if all(rank.exitcode != -SIGKILL for rank in ranks):
            wait_until = time.monotonic() + grace_seconds
            for rank in ranks:
                rank.join(max(0.0, wait_until - time.monotonic()))
        return [rank.exitcode for rank in ranks]
    finally:
        kill_ranks(ranks)


def kill_ranks(ranks: Sequence[BaseProcess]) -> None:
    """Send SIGKILL to all ranks, and wait for their end."""
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()


def _run_rank(argv: list[str], environment: dict[str, str], log: str, prepare: Callable[[], None] | None) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    sys.argv = ["training", *argv]
    from training import __main__ as trainer  # noqa: PLC0415  # installs signal handlers, only here

    if prepare:
        prepare()
    trainer.leave(trainer.main())
