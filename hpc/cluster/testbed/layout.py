"""The shape of a testbed and the names of its files. Pure."""

from dataclasses import dataclass
from pathlib import Path

from hpc.base.errors import UserError
from hpc.cluster.testbed.profiles import PROFILES, Profile, ProfileName
from hpc.slurm.client import TESTBED_DIRECTORY

LOGIN_NAME = "login"
LOGIN_ADDRESS = "10.77.0.254"

ROOT = TESTBED_DIRECTORY
# The TestbedShape as JSON: the first file that `up` writes.
STATE = ROOT / "state.json"
# The value of SLURM_CONF. Slurm looks for its other configuration files in the same directory.
SLURM_CONF = ROOT / "slurm.conf"
GRES_CONF = ROOT / "gres.conf"
SLURMDBD_CONF = ROOT / "slurmdbd.conf"
# Every node's /etc/hosts.
HOSTS = ROOT / "hosts"
MUNGE = ROOT / "munge"
MUNGE_SOCKET = MUNGE / "munge.socket"
# A directory for root only: munge's key, the controller's state, the database.
SECRET = ROOT / "secret"
MUNGE_KEY = SECRET / "munge.key"
# slurmctld's StateSaveLocation: job scripts and environments of all users.
CONTROLLER_STATE = SECRET / "slurmctld"
DATABASE = SECRET / "mariadb"
DATABASE_SOCKET = SECRET / "mariadb.socket"
# The device files of the simulated GPUs, which all nodes share.
DEVICES = ROOT / "dev"
# The parent of the nodes' spool directories (SlurmdSpoolDir).
SPOOL = ROOT / "spool"
# The daemons' PID files.
RUN = ROOT / "run"
LOGS = ROOT / "log"
# Scripts that set up new namespaces: one boots a node, one runs a daemon on the login host.
BOOT_SCRIPTS = ROOT / "boot"
LOGIN_SCRIPT = BOOT_SCRIPTS / f"{LOGIN_NAME}.sh"
# The files that pin namespaces: the login host's host name, the bridge's network, each node's network.
NAMESPACES = ROOT / "ns"
CONTROLLER_UTS = NAMESPACES / "controller.uts"
SWITCH_NET = NAMESPACES / "switch.net"
DIRECTORIES = (ROOT, SECRET, CONTROLLER_STATE, MUNGE, DEVICES, SPOOL, RUN, LOGS, BOOT_SCRIPTS, NAMESPACES)


def log_of(name: str) -> Path:
    """Return the path of the log of a daemon or a node."""
    return LOGS / f"{name}.log"


def boot_script(name: str) -> Path:
    """Return the path of the script that boots a node in new namespaces."""
    return BOOT_SCRIPTS / f"{name}.sh"


def node_net(name: str) -> Path:
    """Return the file to which a node's network namespace is pinned."""
    return NAMESPACES / f"{name}.net"


@dataclass(frozen=True, kw_only=True)
class TestbedNode:
    """A compute node: its name in Slurm, and its address in the testbed's network."""

    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class TestbedShape:
    """Size of a testbed; `up` with the shape of the running testbed changes nothing."""

    profile: ProfileName = "usual"
    """Kind of cluster.
    - typed: GPUs of two types, a node without GPUs, CPUs allocated one by one
    - bare: no grace time on preemption, jobs of at most 5 minutes and without requeues, dead nodes noticed after 300 s
    - cancel: a preempted job is cancelled
    - suspend: a preempted job is suspended
    - strict: one job at a time for the users of the account `users`, no requeues and no changes of jobs
    - addresses: the nodes' names lead to a closed network; in the open network, most ports are closed
    - ranges: three digits in the nodes' names: gpu[001-032] with --nodes 32
    - private: each job has its own /tmp and /dev/shm
    - expedited: Slurm requeues a job without its delay if the job asks for that (Slurm 25.11 and later)"""
    nodes: int = 4
    """Compute nodes: gpu01, gpu02, and so on."""
    gpus_per_node: int = 4
    """Simulated GPUs per node: Slurm allocates them, but there is no hardware."""
    slurmd_timeout: int = 20
    """Seconds after which Slurm marks a dead node down (SlurmdTimeout). With `--profile bare`, it is always 300."""
    accounting: bool = False
    """Also run slurmdbd on a private MariaDB, so that sacct works."""

    def __post_init__(self) -> None:
        """Raise UserError for a number that Slurm or the address range does not allow."""
        for flag, value, minimum, maximum, example in (
            ("--nodes", self.nodes, 1, 99, 4),
            ("--gpus-per-node", self.gpus_per_node, 0, 16, 4),
            ("--slurmd-timeout", self.slurmd_timeout, 5, 65_533, 300),
        ):
            if not minimum <= value <= maximum:
                raise UserError(f"{flag} {value}: give {minimum} to {maximum}; type for example {flag} {example}")

    @property
    def kind(self) -> Profile:
        """The Profile whose name is `profile`."""
        return PROFILES[self.profile]

    @property
    def has_accounting(self) -> bool:
        """Whether slurmdbd runs, because `accounting` is set or the profile has an account."""
        return self.accounting or bool(self.kind.account)

    @property
    def all_nodes(self) -> tuple[TestbedNode, ...]:
        """The nodes: gpu01 at 10.77.0.1, and so on."""
        return tuple(
            TestbedNode(name=self.kind.node_name.format(number), address=f"10.77.0.{number}")
            for number in range(1, self.nodes + 1)
        )

    def node(self, name: str) -> TestbedNode:
        """Return the node of this name. Raises UserError if the testbed has no such node."""
        nodes = {node.name: node for node in self.all_nodes}
        if name not in nodes:
            raise UserError(f"the testbed has no node {name!r}; its nodes are: {' '.join(nodes)}")
        return nodes[name]
