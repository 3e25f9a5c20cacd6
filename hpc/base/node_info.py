"""A machine, its ranks and its network, as `hpc doctor` sees them. Runs everywhere.

`jobs.node_probe` inspects the nodes in a job, and `training.engine.rank_benchmark` measures the ranks.
`hpc.cluster.doctor` judges the results. GB/s are 10^9 bytes per second.
"""

import os
import re
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from hpc.base.files import DEV_SHM
from hpc.base.kernel import driver_version, file_system_type

_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """Facts about one machine. A field has its default outside a job, or if the probe has not determined it."""

    name: str
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

    num_gpus: int = 0
    """Number of GPUs per node that the job requested."""
    sees_runs: bool = False
    """Whether the login node's runs directory exists on this node."""
    slurm_error: str = ""
    """Error of Slurm's commands on this node; empty if they work."""
    problem: str = ""
    """Error that prevented checking or measuring this node; empty if there was none."""

    stage_gb_per_second: float | None = None
    """Speed of writing to the stage directory, with fsync; None if it has no room."""
    runs_gb_per_second: float | None = None
    """Speed of writing to the runs directory, with fsync, on all nodes at once."""

    world_size: int = 0
    """Number of ranks of all nodes together; 0 if they did not pass the preflight."""
    device: str = ""
    """Model of this node's GPUs, or `CPU`."""
    teraflops: tuple[float, ...] = ()
    """Speed of a matrix product on each of this node's devices, while all others compute too."""
    network_gb_per_second: float | None = None
    """Bandwidth to the one of two other nodes that was faster; None in a job of one node."""
    all_reduce_gb_per_second: float | None = None
    """Bus bandwidth of an all-reduce of all ranks, as nccl-tests defines it; None with a single rank."""


def inspect_node(stage_dir: Path) -> NodeInfo:
    """Inspect this machine, and the free space and file system of `stage_dir`."""
    return NodeInfo(
        name=os.uname().nodename.partition(".")[0],
        driver=driver_version(),
        stage_dir=str(stage_dir),
        stage_type=file_system_type(stage_dir),
        stage_free_bytes=_free_bytes(stage_dir),
        shm_free_bytes=_free_bytes(DEV_SHM),
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if _INFINIBAND.exists() else None,
    )


def _free_bytes(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


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
