"""A node's part in `hpc doctor --node`: look at the node, and have its GPUs compute and talk to those of the others.

Runs on compute nodes, once per node, in a job of its own. `python -m jobs.doctor DIRECTORY STAGE_DIR RANKS` prints a
`Machine` as JSON. DIRECTORY was made beside the runs, on the login node.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.node_info import NodeInfo, NodeInfoInJob, inspect_node
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from jobs.ranks import script_command
from jobs.ranks.rendezvous import (
    LOWEST_PORT,
    NodeAllocation,
    Rendezvous,
    find_allocation,
    interface_of,
    local_address,
    program_argv,
    torchrun_argv,
)
from jobs.ranks.round import rank_environment
from jobs.ranks.torchrun import ENVIRONMENT

_CLIENTS = ("squeue", "sinfo", "scontrol", "scancel", "sbatch")
# Enough for a slow import of torch from shared storage.
_PREFLIGHT_SECONDS = 180
_TIMED_OUT = 124
_LONGEST_WORDS = 500


def main(argv: list[str]) -> int:
    """Look at this node and print what there is."""
    shared, stage_dir, ranks = Path(argv[0]), Path(argv[1]), int(argv[2])
    machine = examine(find_allocation(os.environ), shared, stage_dir, ranks)
    # Short lines: those of several nodes are told apart line by line.
    print(json.dumps(asdict(machine), indent=0), flush=True)
    return 0


def examine(place: NodeAllocation, shared: Path, stage_dir: Path, ranks: int) -> NodeInfo:
    """All that can be told of this node."""
    sees_runs = shared.is_dir()
    own = shared if sees_runs else Path(tempfile.mkdtemp(prefix="torchrelay-doctor-"))
    passed, words = preflight(place, own, ranks)
    if not sees_runs:
        shutil.rmtree(own, ignore_errors=True)
    job = NodeInfoInJob(
        sees_runs=sees_runs,
        slurm_error=complaint_of_clients(),
        interface=_interface(place),
        nccl_interfaces=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        passed=passed,
        preflight=words,
    )
    return replace(inspect_node(stage_dir), name=place.host, job=job)


def _interface(place: NodeAllocation) -> str | None:
    """The interface towards the other nodes."""
    try:
        return interface_of(local_address(place)) if place.num_nodes > 1 else None
    except OSError:
        return None  # the preflight says what is wrong


def complaint_of_clients() -> str:
    """Why the agents could not requeue a run from here; nothing if they could."""
    missing = [name for name in _CLIENTS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)}: not on the PATH"
    try:
        slurm.jobs()
    except TorchrelayError as error:
        return str(error)
    return ""


def preflight(place: NodeAllocation, own: Path, ranks: int) -> tuple[bool, str]:
    """Start the ranks as an attempt does, and have them run `training.engine.preflight`.

    Returns:
        Whether all is well, and what was said.
    """
    try:
        address = local_address(place)
    except OSError as error:
        return False, f"{place.host} does not find the other nodes: {error}"
    argv = torchrun_argv(meeting(place), ranks, address, sys.executable)
    program = program_argv(script_command.preflight(RunDir(own), 1, sys.executable))
    limit = ["timeout", "--signal=INT", "--kill-after=10", str(_PREFLIGHT_SECONDS)]
    done = subprocess.run(
        [*limit, *argv, "--max-restarts=0", *program],
        env={**rank_environment(os.environ, place, ranks, address, threads=1), **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode == 0, words_of(done.stdout, done.returncode)[:_LONGEST_WORDS]


def meeting(place: NodeAllocation) -> Rendezvous:
    """Where the ranks of all nodes meet. A job that is never requeued may derive its port from its id. Pure."""
    port = LOWEST_PORT + int(place.job_id) % 20_000
    return Rendezvous(
        run="doctor", attempt=1, nonce=place.job_id, round=1, members=place.hostnames, port=port, is_host=place.is_head
    )


def words_of(output: str, exit_code: int) -> str:
    """What matters of what torchrun and its ranks printed. Pure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if exit_code == _TIMED_OUT:
        return f"no answer in {_PREFLIGHT_SECONDS} s: the nodes do not reach each other, or something hangs"
    if exit_code == 0:
        return next((line for line in lines if line.startswith("preflight:")), "passed")
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    # Those that only suffer say so, and are to be heard last.
    return next(iter(sorted(errors, key=lambda line: "this rank passed" in line)), (lines or ["no word"])[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
