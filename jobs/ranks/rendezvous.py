"""The rendezvous of a round's nodes: port, address, interface, and torchrun's command line. Runs on compute nodes."""

import os
import random
import socket
from dataclasses import dataclass
from pathlib import Path

from hpc.core.kernel import interface_addresses
from jobs.node_attempt import NodeAllocation

# Ports below this belong to system services, those of the ephemeral range to outgoing connections.
LOWEST_PORT = 10_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL = 32_768
# By its path: a user's PYTHONPATH must not replace it.
_TORCHRUN = Path(__file__).parents[2] / "training" / "runtime" / "torchrun_main.py"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The rendezvous of one round, as one of its nodes sees it."""

    run: str
    attempt: int
    secret: str
    round: int
    members: tuple[str, ...]
    """Host names; the others report to the first one (training.runtime.node_rendezvous)."""
    port: int
    node: int
    """This node's place in `members`."""

    @property
    def id(self) -> str:
        """A name, which everybody may see. A process of an earlier attempt, on the same port, has another secret."""
        return f"{self.run}-{self.attempt}-{self.round}"


def torchrun_argv(
    rendezvous: Rendezvous, ranks: int, address: str, python: str, program: list[str], max_restarts: int = 1_000_000
) -> list[str]:
    """The command line of this node's torchrun with the program that it runs as each rank. Pure.

    torchrun executes the program, or runs it, if it is a Python script, in forks of itself.
    """
    return [
        python, "-P", str(_TORCHRUN),
        f"--nnodes={len(rendezvous.members)}",
        f"--nproc-per-node={ranks}",
        # The coordinator, which knows all ranks and their steps, decides how often (jobs.control.root_failure).
        f"--max-restarts={max_restarts}",
        # SIGTERM stays ignored, as inherited; SIGINT stays the agent's way to end torchrun in good order.
        "--signals-to-handle=SIGINT",
        "--rdzv-backend=torchrelay",
        f"--rdzv-endpoint={rendezvous.members[0]}:{rendezvous.port}",
        f"--rdzv-id={rendezvous.id}",
        f"--rdzv-conf=rank={rendezvous.node}",
        f"--local-addr={address}",
        *(("--run-path", "--start-method=fork") if program[0].endswith(".py") else ("--no-python",)),
        # For torchrun, `$$` stands for `$`.
        program[0], *(argument.replace("$", "$$") for argument in program[1:]),
    ]  # fmt: skip


def torchrun_environment(rendezvous: Rendezvous, ranks: dict[str, str]) -> dict[str, str]:
    """The environment of this node's torchrun, which its ranks get, too, but for the secret. Pure."""
    return {
        **ranks,
        # Only this user may read it, unlike the arguments.
        "TORCHRELAY_SECRET": rendezvous.secret,
        # All nodes have the same number of ranks: torchrun need not ask the others for theirs.
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    }


def is_free(port: int) -> bool:
    """Whether torchrun could listen on the port here."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def pick_port(tries: int = 1000) -> int:
    """A free port below the ephemeral range, random so that two jobs on one node hardly ever pick the same.

    Raises:
        OSError: none of the ports that were tried is free.
    """
    first_ephemeral = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else _DEFAULT_EPHEMERAL
    highest = max(first_ephemeral, LOWEST_PORT + 1000)
    generator = random.SystemRandom()
    for _ in range(tries):
        port = generator.randrange(LOWEST_PORT, highest)
        if is_free(port):
            return port
    raise OSError(f"none of {tries} ports tried between {LOWEST_PORT} and {highest} is free on {os.uname().nodename}")


def local_address(allocation: NodeAllocation) -> str:
    """The address under which the other nodes reach this one.

    A host name often resolves to 127.0.1.1 on the node itself. So this is the address that the kernel would use towards
    another node; connecting a UDP socket sends nothing.
    """
    peer = next((name for name in allocation.hostnames if name != allocation.host), None)
    if peer is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(peer), 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address; None if no interface has it."""
    return next((name for name, own in interface_addresses().items() if own == address), None)
