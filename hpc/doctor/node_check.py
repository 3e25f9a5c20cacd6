"""Have compute nodes look at themselves (`jobs.doctor`), in a short job of their own. Runs on the login node."""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hpc.core import node_info
from hpc.core.node_info import NodeInfo
from hpc.core.units import walltime_minutes
from hpc.slurm import client as slurm
from hpc.slurm.cluster import ClusterConfig
from hpc.spec import Resources
from hpc.submit import checks

_OWN = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class NodeCheckRequest:
    """Which nodes are to be looked at."""

    resources: Resources
    names: tuple[str, ...]
    """Empty: any."""


def plan(asked: Resources, site: ClusterConfig, names: Sequence[str]) -> NodeCheckRequest:
    """Resolve what to ask Slurm for.

    Args:
        asked: the flags.
        site: whose partition is looked at.
        names: nodes, or lists of them as Slurm writes them; none: any.

    Raises:
        UserError: the partition cannot give that.
    """
    nodes = tuple(slurm.hostnames(",".join(names))) if names else ()
    wanted = replace(
        asked,
        partition=site.partition["PartitionName"],
        nodes=str(len(nodes)) if nodes else str(asked.max_nodes),
        time=asked.time or "10m",
    )
    return NodeCheckRequest(resources=checks.resolve_resources(wanted, slurm.partitions()), names=nodes)


def look_at_nodes(ask: NodeCheckRequest, runs_dir: Path, stage_dir: Path) -> list[NodeInfo]:
    """The nodes that answered, in the order of their ranks."""
    resources = ask.resources
    print(f"waiting for {resources.nodes} nodes of partition {resources.partition}; Ctrl-C gives up", file=sys.stderr)
    with _beside(runs_dir) as shared:
        return read_reports(slurm.run_srun(srun_argv(ask, shared, stage_dir)))


@contextmanager
def _beside(runs_dir: Path) -> Iterator[Path]:
    """A directory that nodes see, if they see the runs."""
    real = runs_dir.expanduser().resolve()
    existing = next(path for path in (real, *real.parents) if path.exists())
    directory = tempfile.mkdtemp(prefix=".doctor-", dir=existing)
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def srun_argv(ask: NodeCheckRequest, shared: Path, stage_dir: Path) -> list[str]:
    """The srun that starts one task on each node."""
    resources = ask.resources
    given = {key: getattr(resources, key) for key in ("mem", "account", "qos", "constraint", "exclude")}
    path = os.pathsep.join(filter(None, [str(_OWN), os.environ.get("PYTHONPATH")]))
    return [
        "srun", "--quit-on-interrupt", "--label", "--job-name=doctor", f"--partition={resources.partition}",
        f"--nodes={resources.nodes}", "--ntasks-per-node=1", f"--gpus-per-node={resources.gpus_per_node}",
        # A CPU for each rank: a whole share of the node would only be waited for.
        f"--cpus-per-task={resources.gpus_per_node}", f"--time={walltime_minutes(resources.time or '10m')}",
        *(f"--{key}={value}" for key, value in given.items() if value is not None),
        *(f"--{option}" for option in resources.sbatch),
        *([f"--nodelist={','.join(ask.names)}"] if ask.names else []),
        "--kill-on-bad-exit=0", "--wait=0", "--mpi=none",
        # As submitit's scripts do: it says who it is that reads the allocation.
        "env", f"PYTHONPATH={path}", "SUBMITIT_EXECUTOR=slurm", sys.executable, "-P", "-m", "jobs.doctor",
        str(shared), str(stage_dir), str(resources.gpus_per_node),
    ]  # fmt: skip


def read_reports(printed: str) -> list[NodeInfo]:
    """The machines that srun's tasks printed, each line with the number of its task before it. Pure."""
    lines = dict[int, list[str]]()
    for label, line in re.findall(r"^ *(\d+): ?(.*)$", printed, re.MULTILINE):
        lines.setdefault(int(label), []).append(line)
    found = []
    for task in sorted(lines):
        text = "\n".join(lines[task])
        try:
            found.append(node_info.from_json(json.loads(text[text.index("{") :])))
        except (ValueError, KeyError, TypeError):
            continue  # it was ended in the middle, and counts as one that did not answer
    return found
