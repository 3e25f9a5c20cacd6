"""A node's part in `hpc doctor --node`: inspect the node, and run the preflight on its GPUs and between all nodes.

Runs on compute nodes, once per node, in a job of its own: `python -m jobs.doctor DIRECTORY STAGE_DIR GPUS INTERFACE
PORT_RANGE` prints a `NodeInfo` as JSON. DIRECTORY was made beside the runs, on the login node. INTERFACE and PORT_RANGE
may be empty.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.files import write_json
from hpc.core.node_info import NodeInfoInJob, inspect_node
from hpc.core.nodedir import stage_dir_on_node
from hpc.slurm import client as slurm
from hpc.spec import Network
from jobs.control.addresses import head_hosts, interface_of, own_addresses
from jobs.control.channel import ALONE, ControlChannel, ControlClient, ControlServer
from jobs.control.messages import NodeStatus
from jobs.node_attempt import NodeAllocation, find_allocation
from jobs.ranks.rendezvous import Rendezvous, pick_port, torchrun_argv, torchrun_environment
from jobs.ranks.round import rank_environment

_CLIENTS = ("squeue", "sinfo", "scontrol", "scancel", "sbatch")
# Enough for a slow import of torch from shared storage.
_PREFLIGHT_SECONDS = 180
_TIMED_OUT = 124
_LONGEST_MESSAGE = 500
# Slurm starts the tasks of a job within seconds, and files on shared storage show after up to a minute.
_MEET_SECONDS, _POLL_SECONDS = 90.0, 0.2


def main(argv: list[str]) -> int:
    """Inspect this node and print the result."""
    shared, stage_dir, num_gpus = Path(argv[0]), Path(argv[1]), int(argv[2])
    network = Network(interface=argv[3] or None, port_range=argv[4] or None)
    allocation, sees_runs = find_allocation(os.environ), shared.is_dir()
    own = shared if sees_runs else Path(tempfile.mkdtemp(prefix="torchrelay-doctor-"))
    interface = None
    with ExitStack() as stack:
        try:
            meeting = meet(allocation, network, shared, stack) if sees_runs else alone()
            interface = interface_of(meeting.own_address) if meeting.num_nodes > 1 else None
            passed, message = preflight(allocation, network, meeting, own, num_gpus)
        except (TorchrelayError, OSError) as error:
            passed, message = False, str(error)
    if not sees_runs:
        shutil.rmtree(own, ignore_errors=True)
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


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a node knows of the others after their agents have met."""

    num_nodes: int
    secret: str
    host: str
    """At which this node reaches the first one."""
    port: int
    """A free one there."""
    own_address: str
    """At which the others reach this node."""
    channel: ControlChannel | None = None
    """Between the agents, until `stack` is closed; None: this node is alone."""


def alone() -> Meeting:
    """Without the runs directory, a node can only check itself."""
    return Meeting(num_nodes=1, secret=secrets.token_hex(16), host=ALONE, port=pick_port(), own_address=ALONE)


def meet(allocation: NodeAllocation, network: Network, shared: Path, stack: ExitStack) -> Meeting:
    """Connect this node to the first one, as the agents of an attempt do.

    Raises:
        TorchrelayError: they do not reach each other.
    """
    file, deadline = shared / "claim.json", time.monotonic() + _MEET_SECONDS
    if allocation.is_head:
        secret, port = secrets.token_hex(16), pick_port(network.ports)
        server = ControlServer(secret, allocation.num_nodes, network.ports)
        stack.callback(server.close)
        addresses = own_addresses(network.interface)
        write_json(file, {"secret": secret, "port": port, "agent_port": server.port, "addresses": addresses})
        others = set(range(1, allocation.num_nodes))
        while missing := others - server.statuses().keys():
            if time.monotonic() > deadline:
                names = ", ".join(allocation.names(missing))
                raise TorchrelayError(f"{names} did not reach {allocation.head} at {', '.join(addresses)}")
            time.sleep(_POLL_SECONDS)
        channel: ControlChannel = server
        host = own_address = server.own_address
    else:
        while not file.exists():
            if time.monotonic() > deadline:
                raise TorchrelayError(f"{allocation.head} wrote nothing to the runs directory")
            time.sleep(_POLL_SECONDS)
        claim = json.loads(file.read_text(encoding="utf-8"))
        secret, port = claim["secret"], claim["port"]
        hosts = head_hosts(allocation.head, claim["addresses"], network.interface)
        client = ControlClient(hosts, claim["agent_port"], secret, NodeStatus(node_rank=allocation.node_rank))
        stack.callback(client.close)
        if not client.met.wait(_MEET_SECONDS):
            raise TorchrelayError(f"{allocation.host} does not reach {allocation.head} at {', '.join(hosts)}")
        channel, host, own_address = client, client.head_address, client.own_address
    return Meeting(
        num_nodes=allocation.num_nodes, secret=secret, host=host, port=port, own_address=own_address, channel=channel
    )


def preflight(
    allocation: NodeAllocation, network: Network, meeting: Meeting, own: Path, num_gpus: int
) -> tuple[bool, str]:
    """Run the preflight on this node's ranks. Returns whether it passed, and its message."""
    done = run_ranks(allocation, network, meeting, num_gpus, ["-m", "training.engine.preflight", str(own), "1"])
    return done.returncode == 0, summarize(done.stdout, done.returncode)[:_LONGEST_MESSAGE]


def run_ranks(
    allocation: NodeAllocation, network: Network, meeting: Meeting, num_gpus: int, module: list[str]
) -> "subprocess.CompletedProcess[str]":
    """Start this node's ranks as an attempt does, each with a module of ours and its arguments, and wait for them.

    stdout has all that torchrun and the ranks of this node print.
    """
    rendezvous = Rendezvous(
        run="doctor", attempt=1, secret=meeting.secret, round=1, num_nodes=meeting.num_nodes, host=meeting.host,
        port=meeting.port, node=allocation.node_rank if meeting.num_nodes > 1 else 0, ports=network.ports,
    )  # fmt: skip
    address = meeting.own_address
    environment = rank_environment(os.environ, allocation, num_gpus, address, 1, network.interface)
    program = [sys.executable, "-u", "-P", *module]
    argv = torchrun_argv(rendezvous, num_gpus or 1, address, sys.executable, program, max_restarts=0)
    return subprocess.run(
        ["timeout", "--signal=INT", "--kill-after=10", str(_PREFLIGHT_SECONDS), *argv],
        env=torchrun_environment(rendezvous, environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def summarize(output: str, exit_code: int) -> str:
    """The line that matters of what torchrun and its ranks printed. Pure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if exit_code == _TIMED_OUT:
        return f"no answer in {_PREFLIGHT_SECONDS} s: the nodes do not reach each other, or something hangs"
    if exit_code == 0:
        return next((line for line in lines if line.startswith("preflight:")), "passed")
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    # Those of ranks that passed come last: another rank's failure ended them.
    errors.sort(key=lambda line: "this rank passed the check" in line)
    return (errors or lines[-1:] or ["no output"])[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
