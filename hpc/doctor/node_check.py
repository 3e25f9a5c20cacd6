"""Runs `jobs.doctor` on compute nodes, in a short job, and reads its reports. Runs on the login node."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpc.core import node_info
from hpc.core.files import nearest_existing
from hpc.core.node_info import NodeInfo
from hpc.core.units import walltime_minutes
from hpc.slurm import client as slurm
from hpc.slurm.client import ClusterConfig
from hpc.spec import Network, Resources
from hpc.submit import checks


def plan(asked: Resources, site: ClusterConfig, names: Sequence[str]) -> Resources:
    """Resolve the flags for a job on these nodes, names or lists (gpu[01-03]), or on any; or raise a UserError."""
    nodes = len(slurm.hostnames(",".join(names))) if names else asked.max_nodes
    name = site.partition["PartitionName"]
    wanted = replace(asked, partition=name, nodes=str(nodes), time=asked.time or "10m")
    return checks.resolve_resources(wanted, slurm.partitions())


def inspect_nodes(
    resources: Resources, network: Network, names: Sequence[str], runs_dir: Path, stage_dir: Path
) -> list[NodeInfo]:
    """The nodes that answered, in the order of their ranks."""
    count = "1 node" if resources.max_nodes == 1 else f"{resources.nodes} nodes"
    print(f"waiting for {count} of partition {resources.partition}; Ctrl-C cancels", file=sys.stderr)
    real = runs_dir.expanduser().resolve()
    existing = nearest_existing(real)
    # A node that sees the runs directory sees this one.
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing, ignore_cleanup_errors=True) as shared:
        return read_reports(slurm.run_srun(srun_argv(resources, network, names, Path(shared), stage_dir)))


def srun_argv(resources: Resources, network: Network, names: Sequence[str], shared: Path, stage_dir: Path) -> list[str]:
    """The srun that starts one task on each node. Pure but for the environment."""
    given = {key: getattr(resources, key) for key in ("mem", "account", "qos", "constraint", "exclude")}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    return [
        "srun", "--quit-on-interrupt", "--label", "--job-name=doctor", f"--partition={resources.partition}",
        f"--nodes={resources.nodes}", "--ntasks-per-node=1",
        *([f"--gpus-per-node={resources.gpus_per_node}"] if resources.num_gpus else []),
        # One CPU per rank: a larger share might have to wait for other jobs.
        f"--cpus-per-task={resources.ranks_per_node}", f"--time={walltime_minutes(resources.time or '10m')}",
        *(f"--{key}={value}" for key, value in given.items() if value is not None),
        *(f"--{option}" for option in resources.sbatch),
        *([f"--nodelist={','.join(names)}"] if names else []),
        "--kill-on-bad-exit=0", "--wait=0", "--mpi=none",
        # As in submitit's scripts: it selects the reader of the allocation.
        "env", f"PYTHONPATH={path}", "SUBMITIT_EXECUTOR=slurm", sys.executable, "-P", "-m", "jobs.doctor",
        str(shared), str(stage_dir), str(resources.num_gpus), network.interface or "", network.port_range or "",
    ]  # fmt: skip


def read_reports(printed: str) -> list[NodeInfo]:
    """Parse the output of `srun --label`, whose tasks each print a NodeInfo. Pure."""
    lines = dict[int, list[str]]()
    for label, line in re.findall(r"^ *(\d+): ?(.*)$", printed, re.MULTILINE):
        lines.setdefault(int(label), []).append(line)
    found = []
    for task in sorted(lines):
        text = "\n".join(lines[task])
        with suppress(ValueError, KeyError, TypeError):  # cut off: counts as a node that did not answer
            found.append(node_info.from_json(json.loads(text[text.index("{") :])))
    return found
