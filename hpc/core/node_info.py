"""What `hpc doctor` and `hpc smoke` ask of one machine: file systems, limits, network, torch, speed. Runs everywhere.

`hpc.doctor.findings` and `hpc.smoke.judgement` judge it. Imports no torch.
"""

import importlib.util
import os
import re
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.core.kernel import file_system_type, interface_addresses
from hpc.core.nodedir import DEV_SHM

_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True)
class NodeInfoInJob:
    """What only a process of a job can find out about its node."""

    sees_runs: bool
    """Whether the login node's runs directory exists here."""
    slurm_error: str
    """The error of Slurm's commands here; empty if they work."""
    interface: str | None
    """The network interface towards the other nodes of the job; None if there are none."""
    nccl_interfaces: str
    """NCCL_SOCKET_IFNAME."""
    num_gpus: int
    """How many GPUs per node the job asked for."""
    passed: bool
    """Whether the preflight passed."""
    preflight: str
    """Its result, or its error."""


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """One machine."""

    name: str
    stage_dir: str
    stage_type: str | None
    """Type of its file system; None if unknown."""
    stage_free_bytes: int | None
    """None: there is no such directory."""
    memory_free_bytes: int | None
    """Of /dev/shm; None if there is none."""
    open_files: int
    """How many a process may have."""
    locked_bytes: int | None
    """How much memory a process may lock, -1 for unlimited; None if the node has no InfiniBand."""
    interfaces: tuple[str, ...]
    """Those with an IPv4 address, in the kernel's order."""
    job: NodeInfoInJob | None = None


def inspect_node(stage_dir: Path) -> NodeInfo:
    """Describe this machine."""
    return NodeInfo(
        name=os.uname().nodename.partition(".")[0],
        stage_dir=str(stage_dir),
        stage_type=file_system_type(stage_dir),
        stage_free_bytes=_free_bytes(stage_dir),
        memory_free_bytes=_free_bytes(DEV_SHM),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if _INFINIBAND.exists() else None,
        interfaces=tuple(interface_addresses()),
    )


def from_json(document: Mapping[str, Any]) -> NodeInfo:
    """The machine whose `asdict` was written as JSON."""
    fields = dict(document)
    job = NodeInfoInJob(**fields.pop("job")) if fields.get("job") else None
    return NodeInfo(**{**fields, "interfaces": tuple(fields["interfaces"]), "job": job})


def _free_bytes(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class NodeSpeed:
    """What `hpc smoke` knows of one node: what it has, and how fast its disk is (`jobs.smoke_node`)."""

    name: str
    cpu: str
    """Its model."""
    cpus: int
    """Of the machine."""
    memory_bytes: int
    kernel: str
    gpus: tuple[str, ...]
    """The models that the driver lists for the job."""
    driver: str | None
    """NVIDIA's version; None: there is none."""
    stage_dir: str
    stage_type: str | None
    """Type of its file system; None if unknown."""
    stage_free_bytes: int | None
    write_bytes_per_second: float | None
    """To the disk of `stage_dir`, with fsync; None: it has no room."""
    staged_bytes_per_second: float | None
    """From shared storage and other nodes to that disk, as a run stages its data, with all nodes at once; None: not."""
    staging_problem: str
    """Why nothing was staged; empty if it was."""
    clock_seconds: float | None
    """This node's clock minus that of the first one; None: they did not meet."""
    problem: str
    """Why the ranks of this node were not measured; empty if they were."""
    ranks: Mapping[str, Any] | None
    """On the first node what the ranks have measured (`training.engine.rank_benchmark`); None on the others."""


def node_speed(document: Mapping[str, Any]) -> NodeSpeed:
    """The node whose `asdict` was written as JSON."""
    return NodeSpeed(**{**document, "gpus": tuple(document["gpus"])})


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The torch of this environment."""

    version: str
    accelerator: str | None
    """What it was built for beside CPUs: `CUDA 13.2`."""


def torch_build() -> TorchBuild | None:
    """The build that torch's `version.py` describes, without importing torch; None if it is not installed."""
    found = importlib.util.find_spec("torch")
    path = Path(found.origin).with_name("version.py") if found and found.origin else None
    return parse_torch_version(path.read_text()) if path and path.exists() else None


def parse_torch_version(text: str) -> TorchBuild:
    """Parse torch's `version.py`."""
    values = dict(re.findall(r"^(__version__|cuda|hip)\b[^=]*= *'([^']*)'", text, re.MULTILINE))
    names = (("cuda", "CUDA"), ("hip", "ROCm"))
    built = next((f"{name} {values[key]}" for key, name in names if values.get(key)), None)
    return TorchBuild(version=values.get("__version__", "?"), accelerator=built)
