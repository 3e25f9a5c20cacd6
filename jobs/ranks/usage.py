"""A node's part in `hpc top`: what each rank of a run uses of this node's CPUs and GPUs now. Runs on compute nodes.

`python -m jobs.ranks.usage RUN_DIR` prints a line of JSON: this node, and an entry for each rank that runs on it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc.base.kernel import children, cpu_seconds
from hpc.run.nodedir import node_dirs

_SAMPLE_SECONDS = 1.0
_NVIDIA_SMI_SECONDS = 20
_GPU_FIELDS = ("index", "uuid", "name", "utilization.gpu", "memory.used", "memory.total")
_PROCESS_FIELDS = ("gpu_uuid", "pid")


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """A GPU now. What its driver does not say is None."""

    index: int
    uuid: str
    name: str
    utilization_percent: float | None
    """The share of the last moments in which it computed anything."""
    memory_used_mib: float | None
    memory_total_mib: float | None


@dataclass(frozen=True, kw_only=True)
class RankUsage:
    """A rank now."""

    rank: int
    node: str
    cpu_percent: float
    """Of one CPU, with its loader workers."""
    processes: int
    gpus: Sequence[GpuUsage]
    """Those on which it has memory."""


def main(argv: list[str]) -> int:
    """Print what the ranks of a run use."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    ranks = [asdict(rank) for rank in usage_of(Path(argv[0]), node)]
    # One write: the lines of several nodes meet in srun's output.
    sys.stdout.write(json.dumps({"node": node, "ranks": ranks}) + "\n")
    return 0


def usage_of(run: Path, node: str) -> list[RankUsage]:
    """What each rank uses on this machine, measured for a second."""
    ranks = _running_ranks(run)
    before, began = {rank: _cpu_seconds(_tree(pid)) for rank, pid in ranks.items()}, time.monotonic()
    time.sleep(_SAMPLE_SECONDS)
    gpus, processes = query_gpus()
    found = list[RankUsage]()
    for rank, pid in sorted(ranks.items()):
        tree = _tree(pid)
        # A loader worker that has ended meanwhile takes its seconds along.
        spent = max(0.0, _cpu_seconds(tree) - before[rank]) / (time.monotonic() - began)
        own = [gpu for gpu in gpus if not processes.get(gpu.uuid, set()).isdisjoint(tree)]
        found.append(RankUsage(rank=rank, node=node, cpu_percent=round(100 * spent, 1), processes=len(tree), gpus=own))
    return found


def _running_ranks(run: Path) -> dict[int, int]:
    """The process id of each rank's wrapper, by rank (jobs.ranks.process_wrapper)."""
    files = [path for node_dir in node_dirs(run) for path in node_dir.exits.glob("running-*.json")]
    found = dict[int, int]()
    for path in files:
        with suppress(FileNotFoundError):  # the rank has just ended
            record = json.loads(path.read_text())
            if children(record["pid"]):
                found[record["rank"]] = record["pid"]
    return found


def _tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    return [pid, *(each for child in children(pid) for each in _tree(child))]


def _cpu_seconds(pids: Iterable[int]) -> float:
    return sum(map(cpu_seconds, pids))


def query_gpus() -> tuple[list[GpuUsage], dict[str, set[int]]]:
    """The GPUs of this node, and by their UUIDs the processes on them; none without nvidia-smi, or if it fails."""
    if shutil.which("nvidia-smi") is None:
        return [], {}
    gpus = _nvidia_smi(f"--query-gpu={','.join(_GPU_FIELDS)}")
    return parse_gpus(gpus), parse_processes(_nvidia_smi(f"--query-compute-apps={','.join(_PROCESS_FIELDS)}"))


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_NVIDIA_SMI_SECONDS)
    if done.returncode:
        print(f"{os.uname().nodename}: {' '.join(done.stdout.split()) or done.stderr.strip()}", file=sys.stderr)
        return ""
    return done.stdout


def parse_gpus(text: str) -> list[GpuUsage]:
    """Parse `nvidia-smi --query-gpu`. Pure."""
    found = list[GpuUsage]()
    for line in text.splitlines():
        index, uuid, name, *numbers = line.split(", ")
        utilization, used, total = map(_number, numbers)
        found.append(
            GpuUsage(
                index=int(index), uuid=uuid, name=name,
                utilization_percent=utilization, memory_used_mib=used, memory_total_mib=total,
            )
        )  # fmt: skip
    return found


def parse_processes(text: str) -> dict[str, set[int]]:
    """The process ids by GPU, from `nvidia-smi --query-compute-apps`. Pure."""
    found: dict[str, set[int]] = {}
    for line in text.splitlines():
        uuid, pid = line.split(", ")
        found.setdefault(uuid, set()).add(int(pid))
    return found


def _number(text: str) -> float | None:
    """A number, or what stands in its place where there is none: [N/A], of a GPU in MIG mode."""
    return float(text) if text.replace(".", "", 1).isdigit() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
