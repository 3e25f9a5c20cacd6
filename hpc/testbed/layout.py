"""The shape of a testbed, and every file name of one, once. Pure; everybody else in the package builds on it."""

from dataclasses import dataclass
from pathlib import Path

from hpc.core.errors import UserError

LOGIN_NAME = "login"
LOGIN_ADDRESS = "10.77.0.254"
MAX_NODES = 99


@dataclass(frozen=True, kw_only=True)
class TestbedNode:
    """One compute node, as Slurm and its peers know it."""

    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class TestbedShape:
    """What a testbed consists of; two `up` with equal shapes are the same testbed.

    CPUs and memory are declared, not had: the pretended nodes add up to more than the machine.
    """

    nodes: int = 4
    """Compute nodes: gpu01, gpu02, and so on."""
    gpus_per_node: int = 4
    """Pretended GPUs: Slurm hands them out, and there is nothing behind them."""
    cpus_per_node: int = 8
    """CPUs that each node claims to have."""
    memory_mb_per_node: int = 32_768
    """Memory, in MiB, that each node claims to have."""
    slurmd_timeout: int = 20
    """Seconds after which Slurm notices a dead node; 300 unless the administrators of a cluster change it."""
    accounting: bool = False
    """Run slurmdbd on a private MariaDB, too: sacct works."""

    def __post_init__(self) -> None:
        """Refuse a shape that Slurm or the address plan cannot hold."""
        if not 1 <= self.nodes <= MAX_NODES:
            raise UserError(f"{self.nodes} nodes: a testbed has 1 to {MAX_NODES}; type for example --nodes 4")
        if not 0 <= self.gpus_per_node <= 16:
            raise UserError(f"{self.gpus_per_node} GPUs per node: give 0 to 16; type for example --gpus-per-node 4")
        if not 1 <= self.cpus_per_node <= 256:
            raise UserError(f"{self.cpus_per_node} CPUs per node: give 1 to 256; type for example --cpus-per-node 8")
        if not 5 <= self.slurmd_timeout <= 65_533:
            raise UserError(
                f"a node is noticed after {self.slurmd_timeout} s: give 5 to 65533, as --slurmd-timeout 300"
            )
        if self.memory_mb_per_node < 1:
            raise UserError(f"{self.memory_mb_per_node} MB per node: type for example --memory-mb-per-node 32768")

    @property
    def all_nodes(self) -> tuple[TestbedNode, ...]:
        """The nodes in order: gpu01 at 10.77.0.1, and so on."""
        return tuple(
            TestbedNode(name=f"gpu{number:02d}", address=f"10.77.0.{number}") for number in range(1, self.nodes + 1)
        )

    def node(self, name: str) -> TestbedNode:
        """The node of this name; a wrong name lists the right ones."""
        for node in self.all_nodes:
            if node.name == name:
                return node
        names = " ".join(node.name for node in self.all_nodes)
        raise UserError(f"no node {name!r} in the testbed; its nodes are: {names}")


@dataclass(frozen=True)
class TestbedPaths:
    """The files of one testbed, all below one directory. Creates nothing by itself."""

    root: Path

    @property
    def directories(self) -> tuple[Path, ...]:
        """Every directory, parents first."""
        open_to_all = (self.munge, self.devices, self.spool, self.run, self.logs, self.boot_scripts, self.namespaces)
        return (self.root, self.secret, self.controller_state, *open_to_all)

    @property
    def lock(self) -> Path:
        """Held by whoever changes the testbed. Beside the directory, because `down` removes that while it holds it."""
        return self.root.with_name(f"{self.root.name}.lock")

    @property
    def state(self) -> Path:
        """The Shape, as JSON: the first file to appear."""
        return self.root / "state.json"

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF names. Its directory is where Slurm looks for its other configuration files, too."""
        return self.root / "slurm.conf"

    @property
    def gres_conf(self) -> Path:
        """Which device files are GPUs."""
        return self.root / "gres.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        """The accounting daemon's configuration; it must be readable by its own user only."""
        return self.root / "slurmdbd.conf"

    @property
    def hosts(self) -> Path:
        """Every node's /etc/hosts."""
        return self.root / "hosts"

    @property
    def munge(self) -> Path:
        """The directory of munged's socket: open to all."""
        return self.root / "munge"

    @property
    def munge_socket(self) -> Path:
        """Where users and daemons get and check credentials."""
        return self.munge / "munge.socket"

    @property
    def secret(self) -> Path:
        """The directory of what only root may read: munge's key, the controller's state, the database."""
        return self.root / "secret"

    @property
    def munge_key(self) -> Path:
        """The secret that all nodes share."""
        return self.secret / "munge.key"

    @property
    def controller_state(self) -> Path:
        """The controller's StateSaveLocation: job scripts and environments of all users."""
        return self.secret / "slurmctld"

    @property
    def database(self) -> Path:
        """MariaDB's data directory."""
        return self.secret / "mariadb"

    @property
    def database_socket(self) -> Path:
        """MariaDB's only door."""
        return self.secret / "mariadb.socket"

    @property
    def devices(self) -> Path:
        """The pretended GPUs' device files, the same for every node."""
        return self.root / "dev"

    @property
    def spool(self) -> Path:
        """The nodes' SlurmdSpoolDir."""
        return self.root / "spool"

    @property
    def run(self) -> Path:
        """Process id files."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        """What the daemons say."""
        return self.root / "log"

    def log(self, name: str) -> Path:
        """The log of one daemon or one node."""
        return self.logs / f"{name}.log"

    @property
    def boot_scripts(self) -> Path:
        """The directory of the nodes' boot scripts."""
        return self.root / "boot"

    def boot_script(self, node: TestbedNode) -> Path:
        """What turns fresh namespaces into the node."""
        return self.boot_scripts / f"{node.name}.sh"

    @property
    def login_script(self) -> Path:
        """What starts a daemon on the login host."""
        return self.boot_scripts / f"{LOGIN_NAME}.sh"

    @property
    def namespaces(self) -> Path:
        """The directory of the pinned namespaces."""
        return self.root / "ns"

    @property
    def controller_uts(self) -> Path:
        """The host-name namespace of the daemons on the login host."""
        return self.namespaces / "controller.uts"

    @property
    def switch_net(self) -> Path:
        """The network namespace of the bridge between the nodes."""
        return self.namespaces / "switch.net"

    def node_net(self, name: str) -> Path:
        """The network namespace of a node."""
        return self.namespaces / f"{name}.net"
