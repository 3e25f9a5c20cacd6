"""A machine, its ranks and its network, as `hpc doctor` and `hpc smoke` see them. Runs everywhere.

`jobs.node_probe` inspects the nodes in a job, and `training.engine.rank_benchmark` measures the ranks.
`hpc.cluster.doctor.findings` and `hpc.cluster.smoke.judgement` judge the results. GB/s are 10^9 bytes per second.
"""

import os
import platform
import re
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.base.files import DEV_SHM
from hpc.base.kernel import driver_version, file_system_type, interface_addresses

_INFINIBAND, _CPU_INFO = Path("/sys/class/infiniband"), Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """Facts about one machine. A field has its default outside a job, or if the probe has not determined it."""

    name: str
    cpu: str
    """Model of the processor."""
    cpus: int
    """Number of the machine's CPUs, which may be more than the job's."""
    memory_bytes: int
    kernel: str
    driver: str | None
    """Version of NVIDIA's driver; None if none is loaded."""
    stage_dir: str
    stage_type: str | None
    """File system of the stage directory; None if unknown."""
    stage_free_bytes: int | None
    """Free space in the stage directory; None if there is no such directory."""
    shm_free_bytes: int | None = None
    """Free space in /dev/shm; None if the node has no /dev/shm."""
    locked_bytes: int | None = None
    """Bytes of memory that a process may lock, -1 for unlimited; None if the node has no InfiniBand."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces with an IPv4 address, in the kernel's order."""

    gpus: tuple[str, ...] = ()
    """Models of the GPUs that the driver lists for the job."""
    num_gpus: int = 0
    """Number of GPUs per node that the job requested."""
    sees_runs: bool = False
    """Whether the login node's runs directory exists on this node."""
    slurm_error: str = ""
    """Error of Slurm's commands on this node; empty if they work."""
    interface: str | None = None
    """Network interface to the other nodes of the job; None in a job of one node."""
    nccl_interfaces: str = ""
    """Value of NCCL_SOCKET_IFNAME; empty if the variable is not set."""
    preflight: str = ""
    """Result of the preflight; empty if it did not pass."""
    problem: str = ""
    """Error that prevented checking or measuring this node's ranks; empty if there was none."""

    write_bytes_per_second: float | None = None
    """Speed of writing to the stage directory, with fsync; None if it has no room."""
    staged_bytes_per_second: float | None = None
    """Speed of staging to the stage directory, as in a run, on all nodes at once; None if nothing was staged."""
    staging_problem: str = ""
    """Reason why nothing was staged; empty if it was."""
    clock_seconds: float | None = None
    """This node's clock minus the first node's; None if they did not meet."""
    ranks: Mapping[str, Any] | None = None
    """Measurements of the ranks, on the first node (training.engine.rank_benchmark); None on the others."""


def inspect_node(stage_dir: Path) -> NodeInfo:
    """Inspect this machine, and the free space and file system of `stage_dir`."""
    model = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", _CPU_INFO.read_text(), re.MULTILINE)
    return NodeInfo(
        name=os.uname().nodename.partition(".")[0],
        cpu=model[1] if model else platform.machine(),
        cpus=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        driver=driver_version(),
        stage_dir=str(stage_dir),
        stage_type=file_system_type(stage_dir),
        stage_free_bytes=_free_bytes(stage_dir),
        shm_free_bytes=_free_bytes(DEV_SHM),
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if _INFINIBAND.exists() else None,
        interfaces=tuple(interface_addresses()),
    )


def node_from_json(fields: Mapping[str, Any]) -> NodeInfo:
    """Return a NodeInfo from its JSON object, which may lack fields with a default. Raises TypeError if invalid."""
    return NodeInfo(**{**fields, **{name: tuple(fields.get(name, ())) for name in ("gpus", "interfaces")}})


def _free_bytes(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class RankSpeed:
    """The speed of one rank's device, while all others compute too."""

    rank: int
    local_rank: int
    node: str
    device: str
    teraflops: float
    """Speed of a matrix product, in float32 on a CPU, in bfloat16 on a GPU."""
    host_to_device_gb_per_second: float | None
    """Speed of a copy from pinned memory; None if the rank has no GPU."""

    @property
    def where(self) -> str:
        """The node and, if the rank has a GPU, the GPU: `gpu01 GPU 3`."""
        return self.node if self.device == "CPU" else f"{self.node} GPU {self.local_rank}"


@dataclass(frozen=True, kw_only=True)
class AllReduceSpeed:
    """The speed of an all-reduce of all ranks, for one size of message."""

    message_bytes: int
    seconds: float
    gb_per_second: float
    """Bus bandwidth as nccl-tests defines it: 2 (n - 1) / n x bytes / time."""

    @property
    def where(self) -> str:
        """The operation and its message size: `all-reduce of 1,024 bytes`."""
        return f"all-reduce of {self.message_bytes:,} bytes"


@dataclass(frozen=True, kw_only=True)
class PairSpeed:
    """The connection of the first ranks of two nodes, there and back, while other pairs do the same."""

    nodes: tuple[str, str]
    latency_seconds: float
    """Half of a round trip of 4 bytes."""
    gb_per_second: float
    """Bandwidth in one direction."""

    @property
    def where(self) -> str:
        """The names of both nodes: `gpu01 - gpu02`."""
        return " - ".join(self.nodes)


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The build of torch in this environment."""

    version: str
    accelerator: str | None
    """Accelerator for which torch was built, such as `CUDA 13.2`; None if it was built for CPUs only."""


def parse_torch_version(text: str) -> TorchBuild:
    """Return the build that the text of torch's `version.py` describes."""
    values = dict(re.findall(r"^(__version__|cuda|hip)\b[^=]*= *'([^']*)'", text, re.MULTILINE))
    names = (("cuda", "CUDA"), ("hip", "ROCm"))
    built = next((f"{name} {values[key]}" for key, name in names if values.get(key)), None)
    return TorchBuild(version=values.get("__version__", "?"), accelerator=built)
