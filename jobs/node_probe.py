"""A node's part in `hpc doctor --nodes`: inspect the node, check and measure its ranks, and measure its disks.

Runs on compute nodes, once per node, in its own job: `python -m jobs.node_probe DIRECTORY STAGE_DIR GPUS INTERFACE
PORT_RANGE PYTHON` prints a `NodeInfo` as JSON. The login node made DIRECTORY next to the runs. INTERFACE and PORT_RANGE
may be empty. PYTHON runs the ranks.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc.base.errors import TorchrelayError
from hpc.base.node_info import inspect_node
from hpc.base.transport import pick_port
from hpc.base.units import PortRange
from hpc.run.nodedir import stage_dir_on_node
from hpc.run.own_packages import packages_alone, users_pythonpath
from hpc.run.rundir import RunDir
from hpc.run.spec import Network
from hpc.slurm import squeue
from jobs import claim
from jobs.control.channel import ControlChannel, ControlClient, ControlServer, first_node_hosts, own_addresses
from jobs.control.messages import Directive, NodeStatus
from jobs.node_attempt import NodeAllocation, find_allocation
from jobs.ranks.rank_environment import environment_of, rank_environment, torchrun_environment
from jobs.ranks.torchrun import Rendezvous, torchrun_argv

_CLIENTS = ("squeue", "sinfo", "scontrol", "scancel", "sbatch")
_RESULT = "benchmark: "
# Long enough for a slow import of torch from shared storage.
_RANKS_SECONDS = 180
_TIMED_OUT = 124
_LONGEST_MESSAGE = 500
# Slurm starts the tasks of a job within seconds, and files on shared storage show after up to a minute.
_MEET_SECONDS, _POLL_SECONDS = 90.0, 0.2
# All nodes write this much to the shared storage at the same time.
_WRITE_BYTES, _BLOCK_BYTES, _TRIES = 32 * 2**20, 4 * 2**20, 3


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one node knows of the job that probes it."""

    run: RunDir
    """DIRECTORY, where the first node claims the job as if it were an attempt of a run."""
    num_gpus: int
    network: Network
    allocation: NodeAllocation
    python: str = sys.executable
    """Python of the ranks, which may be of another environment."""


def main(argv: list[str]) -> int:
    """Probe this node and print the result."""
    directory, stage_dir, num_gpus, interface, port_range, python = argv
    probe = Probe(
        run=RunDir(Path(directory)), num_gpus=int(num_gpus),
        network=Network(interface=interface or None, port_range=PortRange.parse(port_range) if port_range else None),
        allocation=find_allocation(os.environ), python=python,
    )  # fmt: skip
    directory_here = Path(stage_dir)
    with suppress(TorchrelayError):  # inspect_node then reports that it does not exist
        directory_here = stage_dir_on_node(stage_dir, os.environ)
    fields: dict[str, Any] = {"name": probe.allocation.host}
    with ExitStack() as stack:
        try:
            # Keep the facts that were determined before an error.
            for facts in examine(probe, directory_here, stack):
                fields |= facts
        except (TorchrelayError, OSError) as error:
            fields["problem"] = str(error)
    fields["problem"] = fields.get("problem", "")[:_LONGEST_MESSAGE]
    # Short lines, because the output of several nodes arrives mixed, line by line.
    print(json.dumps(asdict(replace(inspect_node(directory_here), **fields)), indent=0), flush=True)
    return 0


def examine(probe: Probe, stage_dir: Path, stack: ExitStack) -> Iterator[dict[str, Any]]:
    """Check Slurm's commands and the network, measure all ranks and the disks. Yields fields of `NodeInfo`."""
    sees_runs = probe.run.path.is_dir()
    yield {
        "slurm_error": client_error(),
        "num_gpus": probe.num_gpus,
        "sees_runs": sees_runs,
    }
    if not sees_runs:
        return  # the nodes meet in this directory
    channel, secret = meet(probe, stack)
    yield run_ranks(probe, channel, secret)
    yield {"stage_gb_per_second": write_speed(stage_dir) if stage_dir.is_dir() else None}
    yield {"runs_gb_per_second": write_speed(probe.run.path)}


def client_error() -> str:
    """Return why agents on this node could not requeue a run; empty if they could."""
    missing = [name for name in _CLIENTS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)}: not on the PATH"
    try:
        squeue.jobs()
    except TorchrelayError as error:
        return str(error)
    return ""


def meet(probe: Probe, stack: ExitStack) -> tuple[ControlChannel, str]:
    """Connect this node to the first one, as the agents of an attempt do, until `stack` is closed.

    Returns the channel, whose directive has the address at which the ranks meet, and the secret of the connections.

    Raises:
        TorchrelayError: some nodes do not reach the first one.
    """
    allocation, network = probe.allocation, probe.network
    deadline = time.monotonic() + _MEET_SECONDS
    if allocation.is_first:
        secret, addresses = secrets.token_hex(16), own_addresses(network.interface)
        server = ControlServer(secret, allocation.num_nodes, network.ports)
        stack.callback(server.close)
        probe.run.events.mkdir(exist_ok=True)
        claim.claim(probe.run, allocation, server.port, secret, addresses)
        others = set(range(1, allocation.num_nodes))
        while missing := others - server.statuses().keys():
            if time.monotonic() > deadline:
                names = ", ".join(allocation.names(missing))
                raise TorchrelayError(f"{names} did not reach {allocation.first_node} at {', '.join(addresses)}")
            time.sleep(_POLL_SECONDS)
        server.directive = Directive(round=1, host=server.own_address, port=pick_port(network.ports))
        return server, secret
    try:
        claimed = claim.join(probe.run, allocation, lambda: False, _MEET_SECONDS)
    except TorchrelayError as error:
        raise TorchrelayError(f"{allocation.first_node} wrote nothing to the runs directory ({error})") from error
    assert claimed is not None  # noqa: S101  # nothing stops this node
    hosts = first_node_hosts(allocation.first_node, claimed.addresses, network.interface)
    client = ControlClient(hosts, claimed.port, claimed.secret, NodeStatus(node_rank=allocation.node_rank))
    stack.callback(client.close)
    if not client.met.wait(_MEET_SECONDS):
        raise TorchrelayError(f"{allocation.host} does not reach {allocation.first_node} at {', '.join(hosts)}")
    while not client.directive.round:
        if time.monotonic() > deadline + _MEET_SECONDS or client.first_node_is_silent:
            raise TorchrelayError(f"{allocation.host} reached {allocation.first_node}, but not all other nodes did")
        time.sleep(_POLL_SECONDS)
    return client, claimed.secret


def run_ranks(
    probe: Probe, channel: ControlChannel, secret: str, module: str = "training.engine.rank_benchmark"
) -> dict[str, Any]:
    """Start this node's ranks as an attempt does, and wait for them. Returns the fields that they print."""
    allocation, network, address = probe.allocation, probe.network, channel.own_address
    rendezvous = Rendezvous(
        run="probe", attempt=1, secret=secret, round=1, num_nodes=allocation.num_nodes, host=channel.directive.host,
        port=channel.directive.port, node=allocation.node_rank, ports=network.ports,
    )  # fmt: skip
    environment = environment_of(probe.python)
    environment = rank_environment(environment, allocation, probe.num_gpus, address, 1, network.interface)
    program = [probe.python, "-u", "-P", "-m", module]
    argv = torchrun_argv(rendezvous, probe.num_gpus or 1, address, probe.python, program, max_restarts=0)
    with packages_alone() as packages:
        environment["PYTHONPATH"] = ":".join([packages, *users_pythonpath(os.environ.get("PYTHONPATH", ""))])
        done = subprocess.run(
            ["timeout", "--signal=INT", "--kill-after=10", str(_RANKS_SECONDS), *argv],
            env=torchrun_environment(rendezvous, environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", check=False,
        )  # fmt: skip
    return result_of(done.stdout, done.returncode)


def result_of(output: str, exit_code: int) -> dict[str, Any]:
    """Return the fields of the line that begins with `benchmark: `, or `problem`, from the output of torchrun."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if exit_code == _TIMED_OUT:
        return {"problem": f"no answer in {_RANKS_SECONDS} s: the nodes do not reach each other, or something hangs"}
    if exit_code == 0:
        [result] = [line for line in lines if line.startswith(_RESULT)]
        fields: dict[str, Any] = json.loads(result.removeprefix(_RESULT))
        return fields
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    # Ranks that passed the check ended only because another one failed, so their errors come last.
    errors.sort(key=lambda line: "this rank passed the check" in line)
    return {"problem": (errors or lines[-1:] or ["no output"])[0]}


def write_speed(directory: Path) -> float | None:
    """Write and flush temporary files, and return the GB/s of the fastest; None if the disk has no room for one.

    Raises:
        OSError: a file cannot be written.
    """
    if shutil.disk_usage(directory).free < 4 * _WRITE_BYTES:
        return None
    block = os.urandom(_BLOCK_BYTES)  # a disk that compresses must not look faster
    seconds = []
    for _ in range(_TRIES):
        with tempfile.TemporaryFile(dir=directory) as file:
            began = time.perf_counter()
            for _ in range(_WRITE_BYTES // _BLOCK_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return round(_WRITE_BYTES / min(seconds) / 1e9, 4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
