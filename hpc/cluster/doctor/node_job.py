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
from typing import Any, Literal

import tyro

from hpc.base.files import nearest_existing
from hpc.base.node_info import NodeInfo, node_from_json
from hpc.base.units import walltime_minutes
from hpc.commands import cli
from hpc.run.spec import Network, Resources
from hpc.slurm import client as slurm
from hpc.slurm.client import ClusterConfig
from hpc.slurm.srun import own_pythonpath
from hpc.submit import checks
from hpc.submit.options import reading_of


@dataclass(frozen=True, kw_only=True)
class NodeOptions(cli.RunsOptions):
    """The flags of a verb that runs a short job on nodes."""

    node: tuple[str, ...] | None = None
    """Nodes to measure. Default: any nodes (--nodes of them)."""
    resources: tyro.conf.OmitArgPrefixes[Resources] = field(default_factory=Resources)
    network: tyro.conf.OmitArgPrefixes[Network] = field(default_factory=Network)


def node_verb(verb: Callable[[Any], int], options: type[NodeOptions], name: str) -> Callable[..., int]:
    """Return the entry point of a verb whose defaults are the same as in `hpc submit`."""
    return partial(cli.run, verb, options, name, reading=reading_of(options, all_flags=True))


@dataclass(frozen=True, kw_only=True)
class NodeJob:
    """A job that probes nodes."""

    name: Literal["doctor", "smoke"]
    """The job's name, and its work: `doctor` checks the nodes, `smoke` measures them."""
    resources: Resources
    network: Network
    names: Sequence[str]
    """Names of the nodes; empty means any nodes."""
    stage_dir: Path


def plan(name: Literal["doctor", "smoke"], options: NodeOptions, site: ClusterConfig, stage_dir: Path) -> NodeJob:
    """Return a job on the nodes of `--node` (names, or lists such as gpu[01-03]), or if there are none, on any nodes.

    Raises UserError for wrong flags.
    """
    names, asked = options.node or (), options.resources
    nodes = len(slurm.hostnames(",".join(names))) if names else asked.max_nodes
    wanted = replace(asked, partition=site.partition["PartitionName"], nodes=str(nodes), time=asked.time or "10m")
    resources = checks.resolve_resources(wanted, slurm.partitions())
    return NodeJob(name=name, resources=resources, network=options.network, names=names, stage_dir=stage_dir)


def run_on_nodes(job: NodeJob, runs_dir: Path, prepare: Callable[[Path], object] = lambda _: None) -> list[NodeInfo]:
    """Run the job to its end. Returns the nodes that answered, in the order of their tasks.

    `prepare` fills a temporary directory next to the runs, which the nodes share. It is removed after the job.
    """
    resources = job.resources
    count = "1 node" if resources.max_nodes == 1 else f"{resources.nodes} nodes"
    print(f"waiting for {count} of partition {resources.partition}; Ctrl-C cancels", file=sys.stderr)
    # A node that sees the runs directory sees this one.
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
        *([f"--gpus-per-node={resources.gpus_per_node}"] if resources.num_gpus else []),
        # One CPU per rank is enough: a larger share might have to wait for other jobs.
        f"--cpus-per-task={resources.ranks_per_node}", f"--time={walltime_minutes(resources.time or '10m')}",
        *(f"--{key}={value}" for key, value in given.items() if value is not None),
        *(f"--{option}" for option in resources.sbatch),
        *([f"--nodelist={','.join(names)}"] if names else []),
        "--kill-on-bad-exit=0", "--wait=0", "--mpi=none",
        # submitit's scripts set this too: it selects the reader of the allocation.
        "env", f"PYTHONPATH={own_pythonpath()}", "SUBMITIT_EXECUTOR=slurm",
        sys.executable, "-P", "-m", "jobs.node_probe",
        job.name, str(shared), str(job.stage_dir), str(resources.num_gpus), network.interface or "",
        network.port_range or "",
    ]  # fmt: skip


def read_reports(printed: str) -> list[NodeInfo]:
    """Parse the output of `srun --label`, where each task prints a NodeInfo. Return these in the tasks' order. Pure."""
    lines = dict[int, list[str]]()
    for label, line in re.findall(r"^ *(\d+): ?(.*)$", printed, re.MULTILINE):
        lines.setdefault(int(label), []).append(line)
    found = []
    for task in sorted(lines):
        text = "\n".join(lines[task])
        with suppress(ValueError, TypeError):  # a report that is cut off counts as no answer
            found.append(node_from_json(json.loads(text[text.index("{") :])))
    return found
