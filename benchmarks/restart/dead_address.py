"""Shows whether ranks that plain torchrun restarts find the address of a dead rank in its store.

    .venv/bin/python -m benchmarks.restart.dead_address

By default the ranks of all restarts share a store in the first torchrun (https://github.com/pytorch/pytorch/issues/135712),
and gloo's keys have the same names each time. Here the restarted rank 1 connects a second after rank 0, which meanwhile
reads the key that the killed rank 1 left. Prints the outcome of each rank, first with the shared store, then with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Takes five minutes.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
from torch import distributed

RESTARTS = 3


def run_rank() -> None:
    """Connect to the other rank and print the outcome; rank 1 then kills itself."""
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start and rank == 1:
        time.sleep(1)
    began = time.monotonic()
    try:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=15))
        distributed.all_reduce(torch.ones(1))
        outcome = "connected"
    except RuntimeError as error:
        outcome = f"failed: {str(error).splitlines()[0]}"
    print(f"start {start}, rank {rank}, {time.monotonic() - began:.0f} s: {outcome}", flush=True)
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def main() -> None:
    """Run two ranks under torchrun with each kind of store."""
    for disabled in ("0", "1"):
        print(f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE={disabled}", flush=True)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run(
            [*torchrun, f"--max-restarts={RESTARTS}", "-m", __spec__.name, "rank"],
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": disabled},
            stderr=subprocess.DEVNULL,
            check=False,
        )


if __name__ == "__main__":
    run_rank() if sys.argv[1:] == ["rank"] else main()
