"""Runs `jobs.doctor` on compute nodes, in a short job, and reads its reports. Runs on the login node."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hpc.core import node_info
from hpc.core.files import nearest_existing
from hpc.core.node_info import NodeInfo
from hpc.core.units import walltime_minutes
from hpc.slurm import client as slurm
from hpc.slurm.client import ClusterConfig
from hpc.spec import Network, Resources
from hpc.submit import checks

Document = TypeVar("Document")


def plan(asked: Resources, site: ClusterConfig, names: Sequence[str]) -> Resources:
    """Resolve the flags for a job on these nodes, names or lists (gpu[01-03]), or on any; or raise a UserError."""
    nodes = len(slurm.hostnames(",".join(names))) if names else asked.max_nodes
    name = site.partition["PartitionName"]
    wanted = replace(asked, partition=name, nodes=str(nodes), time=asked.time or "10m")
    return checks.resolve_resources(wanted, slurm.partitions())


@dataclass(frozen=True, kw_only=True)
class NodeJob:
    """A module of ours to run once per node, in a job of its own."""

    module: str
    resources: Resources
    network: Network
    names: Sequence[str]
    """Of the nodes; none: any."""
    stage_dir: Path

    @property
    def name(self) -> str:
        """Of the job: `doctor` for jobs.doctor, `smoke` for jobs.smoke_node."""
        return self.module.rpartition(".")[2].partition("_")[0]


def inspect_nodes(
    resources: Resources, network: Network, names: Sequence[str], runs_dir: Path, stage_dir: Path
) -> list[NodeInfo]:
    """The nodes that answered, in the order of their ranks."""
    job = NodeJob(module="jobs.doctor", resources=resources, network=network, names=names, stage_dir=stage_dir)
    return read_reports(run_on_nodes(job, runs_dir))


def run_on_nodes(job: NodeJob, runs_dir: Path, prepare: Callable[[Path], object] = lambda _: None) -> str:
    """Run the job, which ends with this call, and return what `srun --label` printed.

    `prepare` fills the directory beside the runs that the nodes share, which is then removed.
    """
    resources = job.resources
    count = "1 node" if resources.max_nodes == 1 else f"{resources.nodes} nodes"
    print(f"waiting for {count} of partition {resources.partition}; Ctrl-C cancels", file=sys.stderr)
    real = runs_dir.expanduser().resolve()
    existing = nearest_existing(real)
    # A node that sees the runs directory sees this one.
    with tempfile.TemporaryDirectory(prefix=f".{job.name}-", dir=existing, ignore_cleanup_errors=True) as shared:
        prepare(Path(shared))
        return slurm.run_srun(srun_argv(job, Path(shared)))


def srun_argv(job: NodeJob, shared: Path) -> list[str]:
    """The srun that starts one task on each node. Pure but for the environment."""
    resources, network, names = job.resources, job.network, job.names
    given = {key: getattr(resources, key) for key in ("mem", "account", "qos", "constraint", "exclude")}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    return [
        "srun", "--quit-on-interrupt", "--label", f"--job-name={job.name}", f"--partition={resources.partition}",
        f"--nodes={resources.nodes}", "--ntasks-per-node=1",
        *([f"--gpus-per-node={resources.gpus_per_node}"] if resources.num_gpus else []),
        # One CPU per rank: a larger share might have to wait for other jobs.
        f"--cpus-per-task={resources.ranks_per_node}", f"--time={walltime_minutes(resources.time or '10m')}",
        *(f"--{key}={value}" for key, value in given.items() if value is not None),
        *(f"--{option}" for option in resources.sbatch),
        *([f"--nodelist={','.join(names)}"] if names else []),
        "--kill-on-bad-exit=0", "--wait=0", "--mpi=none",
        # As in submitit's scripts: it selects the reader of the allocation.
        "env", f"PYTHONPATH={path}", "SUBMITIT_EXECUTOR=slurm", sys.executable, "-P", "-m", job.module,
        str(shared), str(job.stage_dir), str(resources.num_gpus), network.interface or "", network.port_range or "",
    ]  # fmt: skip


def read_reports(printed: str) -> list[NodeInfo]:
    """Parse the output of `srun --label`, whose tasks each print a NodeInfo. Pure."""
    return read_documents(printed, node_info.from_json)


def read_documents(printed: str, parse: Callable[[dict[str, Any]], Document]) -> list[Document]:
    """Parse the output of `srun --label`, whose tasks each print a JSON document, in their order. Pure."""
    lines = dict[int, list[str]]()
    for label, line in re.findall(r"^ *(\d+): ?(.*)$", printed, re.MULTILINE):
        lines.setdefault(int(label), []).append(line)
    found = []
    for task in sorted(lines):
        text = "\n".join(lines[task])
        with suppress(ValueError, KeyError, TypeError):  # cut off: counts as a node that did not answer
            found.append(parse(json.loads(text[text.index("{") :])))
    return found
