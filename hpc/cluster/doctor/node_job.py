"""Starts `jobs.node_probe` on compute nodes, in a short job, and reads its reports. Runs on the login node."""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from hpc.base.files import nearest_existing
from hpc.base.flags import Flag
from hpc.base.node_info import NodeInfo, node_from_json
from hpc.base.units import NodeRange, TimeLimit
from hpc.commands import cli
from hpc.run.spec import Network, Resources
from hpc.slurm import client as slurm
from hpc.slurm import sinfo
from hpc.slurm.cluster_config import ClusterConfig
from hpc.slurm.srun import own_pythonpath
from hpc.submissions import resolve
from hpc.submissions.options import reading_of
from hpc.submissions.user_python import user_environment

_TIME_LIMIT = TimeLimit(600)


@dataclass(frozen=True, kw_only=True)
class NodeOptions(cli.RunsOptions):
    """The flags of a verb that runs a short job on nodes."""

    node: Annotated[tuple[str, ...] | None, Flag(metavar="NAME [NAME ...]")] = None
    """Nodes to measure. Default: any nodes (--nodes of them)."""
    resources: Resources = field(default_factory=Resources)
    network: Network = field(default_factory=Network)
    python: Path | None = None
    """Python with the torch that the ranks use, as in hpc submit.
    Default: that of the active environment, or this Python."""


def node_verb(verb: Callable[[Any], int], options: type[NodeOptions], name: str) -> Callable[..., int]:
    """Return the `main` function of a verb whose flags have the defaults of `hpc submit`."""
    return partial(cli.run, verb, options, name, reading=reading_of(options, all_flags=True))


@dataclass(frozen=True, kw_only=True)
class NodeJob:
    """A job that probes nodes."""

    name: Literal["doctor", "smoke"]
    """The job's name, and its work: `doctor` checks the nodes, `smoke` measures them."""
    resources: Resources
    network: Network
    names: Sequence[str]
    """Names of the nodes. If empty, Slurm chooses the nodes."""
    stage_dir: Path
    python: str
    """Python of the ranks."""


def plan(name: Literal["doctor", "smoke"], options: NodeOptions, site: ClusterConfig, stage_dir: Path) -> NodeJob:
    """Return a job on the nodes of `--node` (names, or lists such as gpu[01-03]) or, without names, on any nodes.

    Raises UserError if a flag is wrong, or the Python of the ranks does not import torch.
    """
    names, asked = options.node or (), options.resources
    nodes = len(slurm.hostnames(",".join(names))) if names else asked.nodes.most
    wanted = replace(
        asked, partition=site.partition["PartitionName"], nodes=NodeRange(nodes), time=asked.time or _TIME_LIMIT
    )
    resources = resolve.resolve_resources(wanted, sinfo.partitions())
    _, python = user_environment.resolve(
        None, options.python, resources.setup, on_cluster=True, found=user_environment.find_python()
    )
    return NodeJob(
        name=name, resources=resources, network=options.network, names=names, stage_dir=stage_dir,
        python=python or sys.executable,
    )  # fmt: skip


def run_on_nodes(job: NodeJob, runs_dir: Path, prepare: Callable[[Path], object] = lambda _: None) -> list[NodeInfo]:
    """Run the job to its end, and return the reports of the nodes that answered, in the order of their tasks.

    `prepare` may fill a directory that the nodes share. The directory lies next to the runs, and exists during the job.
    """
    resources = job.resources
    count = "1 node" if resources.nodes.most == 1 else f"{resources.nodes} nodes"
    print(f"waiting for {count} of partition {resources.partition}; Ctrl-C cancels", file=sys.stderr)
    # The job's directory is made next to the runs, so a node that sees the runs also sees this directory.
    existing = nearest_existing(runs_dir.expanduser().resolve())
    with tempfile.TemporaryDirectory(prefix=f".{job.name}-", dir=existing, ignore_cleanup_errors=True) as shared:
        prepare(Path(shared))
        return read_reports(slurm.run_srun(srun_argv(job, Path(shared))))


def srun_argv(job: NodeJob, shared: Path) -> list[str]:
    """Return the srun command that starts one task on each node. Pure, except that it reads PYTHONPATH."""
    resources, network, names = job.resources, job.network, job.names
    given = {key: getattr(resources, key) for key in ("mem", "account", "qos", "constraint", "exclude")}
    return [
        "srun", "--quit-on-interrupt", "--label", f"--job-name={job.name}", f"--partition={resources.partition}",
        f"--nodes={resources.nodes}", "--ntasks-per-node=1",
        *([f"--gpus-per-node={resources.gpus_per_node}"] if resources.gpus_per_node.count else []),
        # One CPU per rank is enough: a larger share might have to wait for other jobs.
        f"--cpus-per-task={resources.ranks_per_node}", f"--time={resources.time_limit.minutes}",
        *(f"--{key}={value}" for key, value in given.items() if value is not None),
        *(f"--{option}" for option in resources.sbatch),
        *([f"--nodelist={','.join(names)}"] if names else []),
        "--kill-on-bad-exit=0", "--wait=0", "--mpi=none",
        # SUBMITIT_EXECUTOR selects submitit's reader of the allocation. submitit's own scripts set it, too.
        "env", f"PYTHONPATH={own_pythonpath()}", "SUBMITIT_EXECUTOR=slurm",
        sys.executable, "-P", "-m", "jobs.node_probe",
        job.name, str(shared), str(job.stage_dir), str(resources.gpus_per_node.count), network.interface or "",
        str(network.port_range or ""), job.python,
    ]  # fmt: skip


def read_reports(printed: str) -> list[NodeInfo]:
    """Return the NodeInfo that each task printed, in the order of tasks, from the output of `srun --label`. Pure."""
    lines = dict[int, list[str]]()
    for label, line in re.findall(r"^ *(\d+): ?(.*)$", printed, re.MULTILINE):
        lines.setdefault(int(label), []).append(line)
    found = []
    for task in sorted(lines):
        text = "\n".join(lines[task])
        with suppress(ValueError, TypeError):  # a report that is cut off counts as no answer
            found.append(node_from_json(json.loads(text[text.index("{") :])))
    return found
