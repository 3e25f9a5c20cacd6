"""The shape of a testbed and the names of its files. Pure."""

import re
from dataclasses import dataclass
from pathlib import Path

from hpc.base.errors import UserError
from hpc.cluster.testbed.profiles import PROFILES, Profile, ProfileName

LOGIN_NAME = "login"
LOGIN_ADDRESS = "10.77.0.254"
_MAX_NODES = 99
_NETWORK = re.compile(r"\d+(\.\d+)?[kmg]bit(,\d+(\.\d+)?[mu]s)?")


@dataclass(frozen=True, kw_only=True)
class TestbedNode:
    """A compute node: its name in Slurm, and its address in the testbed's network."""

    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class TestbedShape:
    """Size of a testbed; `up` with the shape of the running testbed changes nothing.

    CPUs and memory are only declared: the simulated nodes may have more of them than the machine.
    """

    profile: ProfileName = "usual"
    """Kind of cluster.
    - typed: GPUs of two types, a node without GPUs, CPUs allocated one by one
    - bare: no grace time on preemption, jobs of at most 5 minutes and without requeues, dead nodes noticed after 300 s
    - cancel: a preempted job is cancelled
    - suspend: a preempted job is suspended
    - strict: one job at a time for the users of the account `users`, no requeues and no changes of jobs
    - addresses: the nodes' names lead to a closed network; in the open network, most ports are closed
    - ranges: more nodes, with three digits: gpu[001-032]
    - private: each job has its own /tmp and /dev/shm
    - expedited: Slurm requeues a job without its delay if the job asks for that (Slurm 25.11 and later)"""
    nodes: int | None = None
    """Compute nodes: gpu01, gpu02, and so on. Default: 4; 32 with `--profile ranges`."""
    gpus_per_node: int = 4
    """Simulated GPUs per node: Slurm allocates them, but there is no hardware."""
    cpus_per_node: int = 8
    """CPUs that each node declares."""
    memory_mb_per_node: int = 32_768
    """Memory, in MiB, that each node declares."""
    slurmd_timeout: int | None = None
    """Seconds after which Slurm marks a dead node down (SlurmdTimeout). Default: 20; 300 with `--profile bare`."""
    shape_network: str | None = None
    """Highest rate at which each node sends, and optionally the delay of its packets: 25gbit, or 1gbit,50us."""
    accounting: bool = False
    """Also run slurmdbd on a private MariaDB, so that sacct works."""

    def __post_init__(self) -> None:
        """Raise UserError for a malformed network, or a number that Slurm or the address range does not allow."""
        if self.shape_network is not None and not _NETWORK.fullmatch(self.shape_network):
            raise UserError(
                f"--shape-network is {self.shape_network!r}: give a rate, or a rate and a delay: 25gbit, or 1gbit,50us"
            )
        for flag, value, minimum, maximum, example in (
            ("--nodes", self.num_nodes, 1, _MAX_NODES, 4),
            ("--gpus-per-node", self.gpus_per_node, 0, 16, 4),
            ("--cpus-per-node", self.cpus_per_node, 1, 256, 8),
            ("--memory-mb-per-node", self.memory_mb_per_node, 1, 2**30, 32_768),
            ("--slurmd-timeout", self.seconds_to_down, 5, 65_533, 300),
        ):
            if not minimum <= value <= maximum:
                raise UserError(f"{flag} {value}: give {minimum} to {maximum}; type for example {flag} {example}")

    @property
    def network(self) -> tuple[str | None, str | None]:
        """The rate and the delay of the nodes' links, in the form that tc reads. None means no limit or no delay."""
        rate, _, delay = (self.shape_network or "").partition(",")
        return rate or None, delay or None

    @property
    def kind(self) -> Profile:
        """The Profile whose name is `profile`."""
        return PROFILES[self.profile]

    @property
    def num_nodes(self) -> int:
        """The number of nodes: `nodes`, or the profile's default."""
        return self.kind.nodes if self.nodes is None else self.nodes

    @property
    def has_accounting(self) -> bool:
        """Whether slurmdbd runs, because `accounting` is set or the profile has an account."""
        return self.accounting or bool(self.kind.account)

    @property
    def seconds_to_down(self) -> int:
        """The seconds until Slurm marks a dead node down: `slurmd_timeout`, or the profile's default."""
        return self.kind.slurmd_timeout if self.slurmd_timeout is None else self.slurmd_timeout

    @property
    def all_nodes(self) -> tuple[TestbedNode, ...]:
        """The nodes: gpu01 at 10.77.0.1, and so on."""
        return tuple(
            TestbedNode(name=self.kind.node_name.format(number), address=f"10.77.0.{number}")
            for number in range(1, self.num_nodes + 1)
        )

    def node(self, name: str) -> TestbedNode:
        """Return the node of this name. Raises UserError if the testbed has no such node."""
        nodes = {node.name: node for node in self.all_nodes}
        if name not in nodes:
            raise UserError(f"the testbed has no node {name!r}; its nodes are: {' '.join(nodes)}")
        return nodes[name]


class TestbedPaths:
    """The paths of one testbed's files, all below `root` except the lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # The lock of commands that change the testbed. It is beside `root`, because `down` holds it and removes `root`.
        self.lock = root.with_name(f"{root.name}.lock")
        # The TestbedShape as JSON: the first file that `up` writes.
        self.state = root / "state.json"
        # The value of SLURM_CONF. Slurm looks for its other configuration files in the same directory.
        self.slurm_conf = root / "slurm.conf"
        self.gres_conf = root / "gres.conf"
        self.slurmdbd_conf = root / "slurmdbd.conf"
        self.job_submit = root / "job_submit.lua"
        self.job_container = root / "job_container.conf"
        # Every node's /etc/hosts.
        self.hosts = root / "hosts"
        self.munge = root / "munge"
        self.munge_socket = self.munge / "munge.socket"
        # A directory for root only: munge's key, the controller's state, the database.
        self.secret = root / "secret"
        self.munge_key = self.secret / "munge.key"
        # slurmctld's StateSaveLocation: job scripts and environments of all users.
        self.controller_state = self.secret / "slurmctld"
        self.database = self.secret / "mariadb"
        self.database_socket = self.secret / "mariadb.socket"
        # The device files of the simulated GPUs, which all nodes share.
        self.devices = root / "dev"
        # The parent of the nodes' spool directories (SlurmdSpoolDir).
        self.spool = root / "spool"
        # The daemons' PID files.
        self.run = root / "run"
        self.logs = root / "log"
        # Scripts that set up new namespaces: one boots a node, one runs a daemon on the login host.
        self.boot_scripts = root / "boot"
        self.login_script = self.boot_scripts / f"{LOGIN_NAME}.sh"
        # The files that pin namespaces: the login host's host name, the bridge's network, each node's network.
        self.namespaces = root / "ns"
        self.controller_uts = self.namespaces / "controller.uts"
        self.switch_net = self.namespaces / "switch.net"

    def log(self, name: str) -> Path:
        """Return the path of the log of a daemon or a node."""
        return self.logs / f"{name}.log"

    def boot_script(self, node: TestbedNode) -> Path:
        """Return the path of the script that boots a node in new namespaces."""
        return self.boot_scripts / f"{node.name}.sh"

    def node_net(self, name: str) -> Path:
        """Return the file to which a node's network namespace is pinned."""
        return self.namespaces / f"{name}.net"
