"""Where the ranks of one attempt meet: the allocation -> node rank, head node, port, torchrun argv.

Runs on compute nodes. Everything but `pick_port`, `is_free` and `local_address` is pure.
"""

import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import submitit

from hpc.core.kernel import interface_addresses

# Below this lie the services of the system; above the other bound the kernel hands out ports to whoever connects.
LOWEST_PORT = 10_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL = 32_768
# In the rendezvous, a node that says nothing for interval x attempts is lost; torchrun's own default is 15 s.
_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_ATTEMPTS = 2, 3
# By its path: whatever a user's script has in its PYTHONPATH, torchrun is ours.
_TORCHRUN = Path(__file__).parents[2] / "training" / "runtime" / "torchrun_main.py"


@dataclass(frozen=True, kw_only=True)
class NodeAllocation:
    """Where this agent stands in the allocation."""

    cluster: str
    job_id: str
    restart: int
    node_rank: int
    hostnames: tuple[str, ...]
    cpus: int | None

    @property
    def is_head(self) -> bool:
        """The head node's agent claims the attempt, hosts the rendezvous and asks for the requeue."""
        return self.node_rank == 0

    @property
    def num_nodes(self) -> int:
        """Nodes in the allocation."""
        return len(self.hostnames)

    @property
    def head(self) -> str:
        """The first node of the list: srun's task 0 runs there."""
        return self.hostnames[0]

    @property
    def host(self) -> str:
        """This node's name."""
        return self.hostnames[self.node_rank]


def find_allocation(environment: Mapping[str, str]) -> NodeAllocation:
    """Read the allocation from the environment.

    Raises:
        RuntimeError: the process was started neither by srun nor by submitit's local executor.
    """
    job = submitit.JobEnvironment()
    local = environment.get("SUBMITIT_EXECUTOR") == "local"
    cpus = environment.get("SLURM_CPUS_PER_TASK")
    return NodeAllocation(
        cluster="local" if local else "slurm",
        job_id=job.job_id,
        restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
        node_rank=job.global_rank,
        hostnames=("localhost",) * job.num_tasks if local else tuple(job.hostnames),
        cpus=int(cpus) if cpus else None,
    )


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One meeting of nodes of an attempt, as one of them sees it."""

    run: str
    attempt: int
    nonce: str
    round: int
    members: tuple[str, ...]
    """Host names; the first one hosts it."""
    port: int
    is_host: bool

    @property
    def id(self) -> str:
        """A straggler of an earlier attempt, or of another run on a port used again, must not join this one."""
        return f"{self.run}-{self.attempt}-{self.nonce}-{self.round}"


def torchrun_argv(rendezvous: Rendezvous, ranks: int, address: str, python: str) -> list[str]:
    """The command line of this node's torchrun, up to the program that it runs (see `program_argv`). Pure."""
    settings = {
        # Said, not guessed: torchrun compares names, and a second network card or an alias makes it wait for ever.
        "is_host": int(rendezvous.is_host),
        "keep_alive_interval": _KEEP_ALIVE_SECONDS,
        "keep_alive_max_attempt": _KEEP_ALIVE_ATTEMPTS,
    }
    return [
        python, "-P", str(_TORCHRUN),
        # Exactly those that are there, as jobs.control.membership knows: torchrun itself does not notice that a
        # node has fallen silent in the middle of a round.
        f"--nnodes={len(rendezvous.members)}",
        f"--nproc-per-node={ranks}",
        # Whether it is worth another try is decided by who knows of all ranks and their steps
        # (jobs.control.coordinator).
        "--max-restarts=1000000",
        # SIGTERM stays ignored, as it was inherited; SIGINT is left as the agent's way to end torchrun in good order.
        "--signals-to-handle=SIGINT",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous.members[0]}:{rendezvous.port}",
        f"--rdzv-id={rendezvous.id}",
        f"--rdzv-conf={','.join(f'{key}={value}' for key, value in settings.items())}",
        f"--local-addr={address}",
        "--no-python",
    ]  # fmt: skip


def program_argv(program: list[str]) -> list[str]:
    """A program and its arguments as torchrun has to be given them: it takes `$$` in an argument for `$`. Pure."""
    return [program[0], *(argument.replace("$", "$$") for argument in program[1:])]


def is_free(port: int) -> bool:
    """Whether the port can be listened on here, as torchrun's store will try to."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def pick_port(tries: int = 1000) -> int:
    """A free port below the ephemeral range, random so that two jobs on one node hardly ever try the same.

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


def local_address(place: NodeAllocation) -> str:
    """The address under which the other nodes reach this one.

    A host name often resolves to 127.0.1.1 on the node itself, so the name is not asked: the kernel says which of
    its addresses it would use towards another node. Connecting a UDP socket sends nothing.
    """
    peer = next((name for name in place.hostnames if name != place.host), None)
    if peer is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(peer), 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address; None if no interface has it."""
    return next((name for name, own in interface_addresses().items() if own == address), None)
