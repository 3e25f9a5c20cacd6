"""A node's part in `hpc doctor --node`: inspect the node, and run the preflight on its GPUs and between all nodes.

Runs on compute nodes, once per node, in a job of its own. `python -m jobs.doctor DIRECTORY STAGE_DIR GPUS` prints a
`NodeInfo` as JSON. DIRECTORY was made beside the runs, on the login node.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.node_info import NodeInfoInJob, inspect_node
from hpc.core.nodedir import stage_dir_on_node
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from jobs.node_attempt import NodeAllocation, find_allocation
from jobs.ranks.rendezvous import (
    LOWEST_PORT,
    Rendezvous,
    interface_of,
    local_address,
    torchrun_argv,
    torchrun_environment,
)
from jobs.ranks.round import preflight_module, rank_environment

_CLIENTS = ("squeue", "sinfo", "scontrol", "scancel", "sbatch")
# Enough for a slow import of torch from shared storage.
_PREFLIGHT_SECONDS = 180
_TIMED_OUT = 124
_LONGEST_MESSAGE = 500


def main(argv: list[str]) -> int:
    """Inspect this node and print the result."""
    shared, stage_dir, num_gpus = Path(argv[0]), Path(argv[1]), int(argv[2])
    allocation, sees_runs = find_allocation(os.environ), shared.is_dir()
    own = shared if sees_runs else Path(tempfile.mkdtemp(prefix="torchrelay-doctor-"))
    passed, message = preflight(allocation, own, num_gpus)
    if not sees_runs:
        shutil.rmtree(own, ignore_errors=True)
    interface = None
    with contextlib.suppress(OSError):  # the preflight reports what is wrong
        interface = interface_of(local_address(allocation)) if allocation.num_nodes > 1 else None
    job = NodeInfoInJob(
        sees_runs=sees_runs,
        slurm_error=client_error(),
        interface=interface,
        nccl_interfaces=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        num_gpus=num_gpus,
        passed=passed,
        preflight=message,
    )
    with contextlib.suppress(TorchrelayError):  # the finding is that it does not exist
        stage_dir = stage_dir_on_node(argv[1], os.environ)
    node = replace(inspect_node(stage_dir), name=allocation.host, job=job)
    # Short lines: those of several nodes arrive mixed, line by line.
    print(json.dumps(asdict(node), indent=0), flush=True)
    return 0


def client_error() -> str:
    """Why the agents could not requeue a run from here; empty if they could."""
    missing = [name for name in _CLIENTS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)}: not on the PATH"
    try:
        slurm.jobs()
    except TorchrelayError as error:
        return str(error)
    return ""


def preflight(allocation: NodeAllocation, own: Path, num_gpus: int) -> tuple[bool, str]:
    """Start the ranks as an attempt does, and run the preflight on them. Returns whether it passed, and its message."""
    try:
        address = local_address(allocation)
    except OSError as error:
        return False, f"{allocation.host} cannot find the other nodes: {error}"
    # A job that is never requeued may derive its port from its id. That is no secret, but nothing is at stake here.
    rendezvous = Rendezvous(
        run="doctor", attempt=1, secret=allocation.job_id, round=1, members=allocation.hostnames,
        port=LOWEST_PORT + int(allocation.job_id) % 20_000, node=allocation.node_rank,
    )  # fmt: skip
    program = [sys.executable, "-u", "-P", *preflight_module(RunDir(own), 1)]
    argv = torchrun_argv(rendezvous, num_gpus or 1, address, sys.executable, program, max_restarts=0)
    done = subprocess.run(
        ["timeout", "--signal=INT", "--kill-after=10", str(_PREFLIGHT_SECONDS), *argv],
        env=torchrun_environment(rendezvous, rank_environment(os.environ, allocation, num_gpus, address, threads=1)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode == 0, summarize(done.stdout, done.returncode)[:_LONGEST_MESSAGE]


def summarize(output: str, exit_code: int) -> str:
    """The line that matters of what torchrun and its ranks printed. Pure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if exit_code == _TIMED_OUT:
        return f"no answer in {_PREFLIGHT_SECONDS} s: the nodes do not reach each other, or something hangs"
    if exit_code == 0:
        return next((line for line in lines if line.startswith("preflight:")), "passed")
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    # Those of ranks that passed come last: another rank's failure ended them.
    return next(iter(sorted(errors, key=lambda line: "this rank passed" in line)), (lines or ["no output"])[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
