"""A node's part in `hpc doctor --node` and `hpc smoke`: inspect the node, and let its ranks check or measure it.

Runs on compute nodes, once per node, in its own job: `python -m jobs.node_probe JOB DIRECTORY STAGE_DIR GPUS INTERFACE
PORT_RANGE PYTHON` prints a `NodeInfo` as JSON. JOB is `doctor` or `smoke`. The login node made DIRECTORY next to the
runs; for `smoke` it contains the data to stage. INTERFACE and PORT_RANGE may be empty. PYTHON runs the ranks.
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
from hpc.run.own_packages import packages_alone
from hpc.run.rundir import RunDir
from hpc.run.spec import Network
from hpc.slurm import squeue
from hpc.slurm.srun import users_pythonpath
from jobs import claim
from jobs.control.addresses import first_node_hosts, interface_of, own_addresses
from jobs.control.channel import ControlChannel, ControlClient, ControlServer
from jobs.control.messages import Directive, NodeStatus
from jobs.node_attempt import NodeAllocation, find_allocation
from jobs.ranks.round import environment_of, rank_environment
from jobs.ranks.torchrun_command import Rendezvous, torchrun_argv, torchrun_environment
from jobs.staging.copy_progress import CopyProgress, StagingStopped
from jobs.staging.node_staging import NodeGroup
from jobs.staging.stager import Stager

DATA = "data"
"""Name of the data set in DIRECTORY."""
_CLIENTS = ("squeue", "sinfo", "scontrol", "scancel", "sbatch")
_PREFLIGHT, _BENCHMARK = "preflight: ", "benchmark: "
# Long enough for a slow import of torch from shared storage.
_RANKS_SECONDS = 180
_TIMED_OUT = 124
_LONGEST_MESSAGE = 500
# Slurm starts the tasks of a job within seconds, and files on shared storage show after up to a minute.
_MEET_SECONDS, _POLL_SECONDS = 90.0, 0.2
_WRITE_BYTES, _BLOCK_BYTES = 256 * 2**20, 4 * 2**20
_NVIDIA_SMI_SECONDS = 20
# A mount that hangs must not hold up the other nodes for ever.
_STAGE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one node knows of the job that probes it."""

    run: RunDir
    """DIRECTORY, where the first node claims the job as if it were an attempt of a run."""
    stage_dir: str
    num_gpus: int
    network: Network
    allocation: NodeAllocation
    python: str = sys.executable
    """Python of the ranks, which may be of another environment."""


def main(argv: list[str]) -> int:
    """Probe this node and print the result."""
    job, directory, stage_dir, num_gpus, interface, port_range, python = argv
    probe = Probe(
        run=RunDir(Path(directory)), stage_dir=stage_dir, num_gpus=int(num_gpus),
        network=Network(interface=interface or None, port_range=PortRange.parse(port_range) if port_range else None),
        allocation=find_allocation(os.environ), python=python,
    )  # fmt: skip
    found: dict[str, Any] = {"name": probe.allocation.host, "sees_runs": probe.run.path.is_dir()}
    with ExitStack() as stack:
        try:
            # Keep the facts that were found before an error.
            for facts in (measure if job == "smoke" else check)(probe, stack):
                found |= facts
        except (TorchrelayError, OSError) as error:
            found["problem"] = str(error)
    found["problem"] = found.get("problem", "")[:_LONGEST_MESSAGE]
    directory_here = Path(stage_dir)
    with suppress(TorchrelayError):  # inspect_node then reports that it does not exist
        directory_here = stage_dir_on_node(stage_dir, os.environ)
    # Short lines, because the output of several nodes arrives mixed, line by line.
    print(json.dumps(asdict(replace(inspect_node(directory_here), **found)), indent=0), flush=True)
    return 0


def check(probe: Probe, stack: ExitStack) -> Iterator[dict[str, Any]]:
    """Check Slurm's commands and the network, and run the preflight on all ranks. Yields fields of `NodeInfo`."""
    yield {
        "slurm_error": client_error(),
        "nccl_interfaces": os.environ.get("NCCL_SOCKET_IFNAME", ""),
        "num_gpus": probe.num_gpus,
    }
    if not probe.run.path.is_dir():
        # Without the runs directory, a node can only check itself.
        own = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrelay-doctor-"))
        alone = replace(probe.allocation, node_rank=0, hostnames=(probe.allocation.host,))
        probe = replace(probe, run=RunDir(Path(own)), allocation=alone)
    channel, secret = meet(probe, stack)
    if probe.allocation.num_nodes > 1:
        yield {"interface": interface_of(channel.own_address)}
    line, problem = run_ranks(probe, channel, secret, ["training.engine.preflight"], _PREFLIGHT)
    yield {"preflight": "" if problem else (line or "passed")[:_LONGEST_MESSAGE], "problem": problem}


def measure(probe: Probe, stack: ExitStack) -> Iterator[dict[str, Any]]:
    """Measure the disk, the clock, the staging of data, and all ranks. Yields fields of `NodeInfo`."""
    yield {"gpus": gpu_names()}
    stage_dir = stage_dir_on_node(probe.stage_dir, os.environ)
    yield {"write_bytes_per_second": write_rate(stage_dir)}
    channel, secret = meet(probe, stack)
    skew = channel.clock_skew_seconds if isinstance(channel, ControlClient) else 0.0
    yield {"clock_seconds": round(-skew, 3)}
    yield stage(probe, channel, secret, stage_dir, stack)
    module = ["training.engine.rank_benchmark", probe.allocation.host]
    line, problem = run_ranks(probe, channel, secret, module, _BENCHMARK)
    yield {"ranks": json.loads(line.removeprefix(_BENCHMARK)) if line else None, "problem": problem}


def gpu_names() -> tuple[str, ...]:
    """Return the names of this node's GPUs; empty if nvidia-smi is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=_NVIDIA_SMI_SECONDS)
    if done.returncode:
        print(f"{os.uname().nodename}: {' '.join(done.stdout.split()) or done.stderr.strip()}", file=sys.stderr)
        return ()
    return tuple(done.stdout.splitlines())


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


def run_ranks(probe: Probe, channel: ControlChannel, secret: str, module: list[str], beginning: str) -> tuple[str, str]:
    """Start this node's ranks as an attempt does, let each run a module with its arguments, and wait for them.

    Returns the first line that starts with `beginning`, and the error. Each is empty if there is none.
    """
    allocation, network, address = probe.allocation, probe.network, channel.own_address
    rendezvous = Rendezvous(
        run="probe", attempt=1, secret=secret, round=1, num_nodes=allocation.num_nodes, host=channel.directive.host,
        port=channel.directive.port, node=allocation.node_rank, ports=network.ports,
    )  # fmt: skip
    environment = environment_of(probe.python)
    environment = rank_environment(environment, allocation, probe.num_gpus, address, 1, network.interface)
    program = [probe.python, "-u", "-P", "-m", *module]
    argv = torchrun_argv(rendezvous, probe.num_gpus or 1, address, probe.python, program, max_restarts=0)
    with packages_alone() as packages:
        environment["PYTHONPATH"] = ":".join([packages, *users_pythonpath(os.environ.get("PYTHONPATH", ""))])
        done = subprocess.run(
            ["timeout", "--signal=INT", "--kill-after=10", str(_RANKS_SECONDS), *argv],
            env=torchrun_environment(rendezvous, environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", check=False,
        )  # fmt: skip
    return summarize(done.stdout, done.returncode, beginning)


def summarize(output: str, exit_code: int, beginning: str) -> tuple[str, str]:
    """Return the first line that starts with `beginning`, and the error, in the output of torchrun and its ranks."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if exit_code == _TIMED_OUT:
        return "", f"no answer in {_RANKS_SECONDS} s: the nodes do not reach each other, or something hangs"
    if exit_code == 0:
        return next((line for line in lines if line.startswith(beginning)), ""), ""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    # Ranks that passed the check ended only because another one failed, so their errors come last.
    errors.sort(key=lambda line: "this rank passed the check" in line)
    return "", (errors or lines[-1:] or ["no output"])[0]


def write_rate(directory: Path) -> float | None:
    """Write and flush a temporary file, and return the bytes per second; None if the disk has no room for it.

    Raises:
        OSError: the file cannot be written.
    """
    size = min(_WRITE_BYTES, shutil.disk_usage(directory).free // 4) // _BLOCK_BYTES * _BLOCK_BYTES
    if not size:
        return None
    block = os.urandom(_BLOCK_BYTES)  # a disk that compresses must not look faster
    with tempfile.TemporaryFile(dir=directory) as file:
        began = time.perf_counter()
        for _ in range(size // _BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return round(size / (time.perf_counter() - began))


def stage(probe: Probe, channel: ControlChannel, secret: str, stage_dir: Path, stack: ExitStack) -> dict[str, Any]:
    """Stage the data as an attempt does, together with the other nodes; the copy is deleted when `stack` is closed.

    Returns a field of `NodeInfo`: the rate, or why staging failed. No error is raised: the ranks are still measured.
    """
    group = NodeGroup(probe.allocation, channel, probe.run.path / DATA, secret, probe.network.ports)
    deadline = time.monotonic() + _STAGE_SECONDS

    def watch(_: CopyProgress | None) -> bool:
        if group.is_first:
            group.update()
        return time.monotonic() > deadline

    # The stager stays open until all ranks have ended: other nodes may still fetch from this one.
    stager = stack.enter_context(
        Stager(stage_dir, group=group, watch=watch, keep_seconds=0, timeout_seconds=_STAGE_SECONDS)
    )
    try:
        staged = stager.stage(probe.run.path / DATA)
    except (TorchrelayError, OSError, StagingStopped) as error:
        group.withdraw()
        return {"staging_problem": str(error) or f"it took more than {_STAGE_SECONDS:.0f} s"}
    if staged.in_place:
        return {"staging_problem": staged.in_place}
    return {"staged_bytes_per_second": round((staged.bytes_from_source + staged.bytes_from_peers) / staged.seconds)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
