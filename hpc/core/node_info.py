"""What one machine is like for a training: its file systems, limits, network and torch. Runs everywhere; no torch.

`look` gathers; what it means for a run is told by `hpc.doctor.node_findings`.
"""

import fcntl
import importlib.util
import os
import re
import resource
import shutil
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc.core.nodedir import MEMORY

_MOUNTS = Path("/proc/mounts")
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, kw_only=True)
class JobNodeInfo:
    """What only a process of a job can tell of its node."""

    sees_runs: bool
    """Whether the runs directory of the login node is this node's as well."""
    slurm: str
    """What Slurm's clients complain of here; nothing if they work."""
    interface: str | None
    """The one that leads to the other nodes of the job; None if there are none."""
    asked_interfaces: str
    """NCCL_SOCKET_IFNAME."""
    passed: bool
    """Whether the preflight did."""
    preflight: str
    """What the preflight said."""


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """What was found out of one machine."""

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
    job: JobNodeInfo | None = None


def inspect_node(stage_dir: Path) -> NodeInfo:
    """Look at this machine."""
    return NodeInfo(
        name=os.uname().nodename.partition(".")[0],
        stage_dir=str(stage_dir),
        stage_type=file_system_type(stage_dir),
        stage_free_bytes=_free_bytes(stage_dir),
        memory_free_bytes=_free_bytes(MEMORY),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        interfaces=tuple(interface_addresses()),
    )


def from_json(document: Mapping[str, Any]) -> NodeInfo:
    """Read back what `asdict` and JSON have made of a machine."""
    fields = dict(document)
    job = JobNodeInfo(**fields.pop("job")) if fields.get("job") else None
    return NodeInfo(**{**fields, "interfaces": tuple(fields["interfaces"]), "job": job})


def to_json(machine: NodeInfo) -> dict[str, Any]:
    """A machine as a JSON document."""
    return asdict(machine)


def _free_bytes(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def file_system_type(path: Path) -> str | None:
    """The type of the file system that a path is on, or will be; None if unknown."""
    try:
        mounts = _MOUNTS.read_text(errors="replace")
    except OSError:
        return None
    return mounted_type(mounts, path.expanduser().resolve())


def mounted_type(mounts: str, path: Path) -> str | None:
    """The type of the file system of an absolute path, from /proc/mounts: the innermost mount, the last one there."""
    found: tuple[str | None, int] = (None, -1)
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split()
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), place))
        if path.is_relative_to(point) and len(point.parts) >= found[1]:
            found = kind, len(point.parts)
    return found[0]


def interface_addresses() -> dict[str, str]:
    """The IPv4 address of every network interface that has one, by its name, in the kernel's order."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The torch of this environment."""

    version: str
    accelerator: str | None
    """What it was built for beside CPUs: `CUDA 13.2`."""


def torch_build() -> TorchBuild | None:
    """What torch says of itself in its `version.py`, without importing it; None if there is none."""
    found = importlib.util.find_spec("torch")
    path = Path(found.origin).with_name("version.py") if found and found.origin else None
    return parse_torch_version(path.read_text()) if path and path.exists() else None


def parse_torch_version(text: str) -> TorchBuild:
    """Parse torch's `version.py`."""
    values = dict(re.findall(r"^(__version__|cuda|hip)\b[^=]*= *'([^']*)'", text, re.MULTILINE))
    names = (("cuda", "CUDA"), ("hip", "ROCm"))
    built = next((f"{name} {values[key]}" for key, name in names if values.get(key)), None)
    return TorchBuild(version=values.get("__version__", "?"), accelerator=built)
