"""A node's part in `hpc smoke`: what it has, and how fast its disk, its staging, its devices and its network are.

Runs on compute nodes, once per node, in a job of its own: `python -m jobs.smoke_node DIRECTORY STAGE_DIR GPUS INTERFACE
PORT_RANGE`, arguments as those of `jobs.doctor`, prints a `NodeSpeed` as JSON. DIRECTORY has the data to stage.
"""

import json
import os
import platform
import re
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc.core.errors import TorchrelayError
from hpc.core.node_info import NodeSpeed, inspect_node
from hpc.core.nodedir import stage_dir_on_node
from hpc.spec import Network
from hpc.staging.copy_progress import CopyProgress, StagingStopped
from hpc.staging.stager import Stager
from jobs.control.channel import ControlClient
from jobs.doctor import Meeting, meet, run_ranks, summarize
from jobs.node_attempt import NodeAllocation, find_allocation
from jobs.ranks.usage import query_gpus
from jobs.staging.node_staging import NodeGroup

DATA = "data"
"""In DIRECTORY."""
_BENCHMARK = "benchmark: "
_WRITE_BYTES, _BLOCK_BYTES = 256 * 2**20, 4 * 2**20
# A mount that hangs must not hold up the other nodes for ever.
_STAGE_SECONDS = 60.0
_LONGEST_PROBLEM = 500
_NVIDIA_VERSION, _CPU_INFO, _MEMORY_INFO = (
    Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo"), Path("/proc/meminfo"),
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure this node and print the result."""
    shared, num_gpus = Path(argv[0]), int(argv[2])
    network = Network(interface=argv[3] or None, port_range=argv[4] or None)
    allocation, stage_dir = find_allocation(os.environ), Path(argv[1])
    problem, ranks, clock = "", None, None
    staged: tuple[float | None, str] = None, ""
    written = None
    with ExitStack() as stack:
        try:
            stage_dir = stage_dir_on_node(argv[1], os.environ)
            written = write_rate(stage_dir)
            meeting = meet(allocation, network, shared, stack)
            clock = -meeting.channel.clock_skew_seconds if isinstance(meeting.channel, ControlClient) else 0.0
            staged = stage(allocation, network, meeting, shared / DATA, stage_dir, stack)
            ranks, problem = measure_ranks(allocation, network, meeting, num_gpus)
        except (TorchrelayError, OSError) as error:
            problem = str(error)
    node = inspect_node(stage_dir)
    speed = NodeSpeed(
        name=allocation.host,
        **machine(),
        stage_dir=str(stage_dir),
        stage_type=node.stage_type,
        stage_free_bytes=node.stage_free_bytes,
        write_bytes_per_second=written,
        staged_bytes_per_second=staged[0],
        staging_problem=staged[1],
        clock_seconds=None if clock is None else round(clock, 3),
        problem=problem[:_LONGEST_PROBLEM],
        ranks=ranks,
    )
    # Short lines: those of several nodes arrive mixed, line by line.
    print(json.dumps(asdict(speed), indent=0), flush=True)
    return 0


def machine() -> dict[str, Any]:
    """What this machine has."""
    model = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", _CPU_INFO.read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", _MEMORY_INFO.read_text(), re.MULTILINE)
    gpus, _ = query_gpus()
    return {
        "cpu": model[1] if model else platform.machine(),
        "cpus": os.cpu_count() or 1,
        "memory_bytes": int(memory[1]) * 1024 if memory else 0,
        "kernel": platform.release(),
        "gpus": tuple(gpu.name for gpu in gpus),
        "driver": driver_version(),
    }


def driver_version() -> str | None:
    """The version of NVIDIA's driver here; None if none is loaded."""
    with suppress(OSError):
        found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", _NVIDIA_VERSION.read_text())
        return found[1] if found else None
    return None


def write_rate(directory: Path) -> float | None:
    """Bytes per second of a file that is written there, flushed and deleted; None if the disk has no room for it.

    Raises:
        OSError: it cannot be written.
    """
    free = inspect_node(directory).stage_free_bytes or 0
    size = min(_WRITE_BYTES, free // 4) // _BLOCK_BYTES * _BLOCK_BYTES
    if not size:
        return None
    block = os.urandom(_BLOCK_BYTES)  # a disk that compresses must not look faster
    with tempfile.TemporaryFile(dir=directory) as file:
        began = time.perf_counter()
        for _ in range(size // _BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return round(size / (time.perf_counter() - began))


def stage(
    allocation: NodeAllocation, network: Network, meeting: Meeting, source: Path, stage_dir: Path, stack: ExitStack
) -> tuple[float | None, str]:
    """Stage the data as an attempt does, together with the other nodes; the copy is deleted when `stack` is closed.

    Returns the bytes per second, or None and why it failed: the network is measured all the same.
    """
    if meeting.channel is None:
        return None, "this node is alone"
    group = NodeGroup(allocation, meeting.channel, source, meeting.secret, network.ports)
    deadline = time.monotonic() + _STAGE_SECONDS

    def watch(_: CopyProgress | None) -> bool:
        if group.is_head:
            group.update()
        return time.monotonic() > deadline

    # Open until all ranks have ended: other nodes may still fetch from this one.
    stager = stack.enter_context(
        Stager(stage_dir, group=group, watch=watch, keep_seconds=0, timeout_seconds=_STAGE_SECONDS)
    )
    try:
        staged = stager.stage(source)
    except (TorchrelayError, OSError, StagingStopped) as error:
        group.withdraw()
        return None, str(error) or f"it took more than {_STAGE_SECONDS:.0f} s"
    if staged.in_place:
        return None, staged.in_place
    return round((staged.bytes_from_source + staged.bytes_from_peers) / staged.seconds), ""


def measure_ranks(
    allocation: NodeAllocation, network: Network, meeting: Meeting, num_gpus: int
) -> tuple[dict[str, Any] | None, str]:
    """Start this node's ranks. Returns what they measured, on the first node, and what went wrong."""
    module = ["-m", "training.engine.rank_benchmark", allocation.host]
    done = run_ranks(allocation, network, meeting, num_gpus, module)
    if done.returncode:
        return None, summarize(done.stdout, done.returncode)
    line = next((line for line in done.stdout.splitlines() if line.startswith(_BENCHMARK)), "")
    return (json.loads(line.removeprefix(_BENCHMARK)) if line else None), ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
