"""What `hpc doctor` asks of one machine: its file systems, limits, network and torch. Runs everywhere; no torch.

`hpc.doctor.findings` judges it.
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
