"""Starts `jobs.node_probe` on compute nodes, in a short job, and reads its reports. Runs on the login node."""

import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec

from hpc.base.files import expanded, nearest_existing
from hpc.base.flags import Flag
from hpc.base.node_info import NodeInfo
from hpc.base.units import NodeRange, TimeLimit
from hpc.commands import cli
from hpc.run.own_packages import own_pythonpath
from hpc.run.spec import Network, Resources
from hpc.slurm import client as slurm
from hpc.slurm import sinfo
from hpc.submissions.resources import resolve_resources
from hpc.submissions.user_python import user_environment


@dataclass(frozen=True, kw_only=True)
class NodeOptions(cli.RunsOptions):
    """The flags of a job that probes nodes."""

    node: Annotated[tuple[str, ...] | None, Flag(metavar="NAME [NAME ...]")] = None
    """Measure these nodes in a short job, instead of any nodes (--nodes)."""
    resources: Resources = field(default_factory=Resources)
    network: Network = field(default_factory=Network)
    stage_dir: Path = Path("/tmp")  # noqa: S108 - submit's default
    """Directory on each node's own disk."""
    python: Path | None = None
    """Python with the torch that the ranks use, as in hpc submit.
    Default: that of the active environment, or this Python."""


def probe_nodes(options: NodeOptions, partition: str) -> tuple[Resources, list[NodeInfo]]:
    """Run the job on the nodes of `--node` (names, or lists such as gpu[01-03]) or, without names, on any nodes.

    Returns the job's resources, and the reports of the nodes that answered, in the order of their tasks.
    Raises UserError if a flag is wrong, or the Python of the ranks does not import torch.
    """
    names, asked, network = options.node or (), options.resources, options.network
    nodes = len(slurm.hostnames(",".join(names))) if names else asked.nodes.most
    asked = replace(asked, partition=partition, nodes=NodeRange(nodes), time=asked.time or TimeLimit(600))
    resources = resolve_resources(asked, sinfo.partitions())
    own = user_environment.find_python()
    _, python, _ = user_environment.resolve(None, options.python, resources.setup, on_cluster=True, found=own)
    print(
        f"waiting for {'1 node' if nodes == 1 else f'{nodes} nodes'} of partition {partition}; Ctrl-C cancels",
        file=sys.stderr,
    )
    # The job's directory is made next to the runs, so a node that sees the runs also sees this directory.
    existing = nearest_existing(expanded(options.runs_dir).resolve())
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing, ignore_cleanup_errors=True) as shared:
        probe = (
            "jobs.node_probe", shared, str(options.stage_dir), str(resources.gpus_per_node.count),
            network.interface or "", str(network.port_range or ""), python or sys.executable,
        )  # fmt: skip
        return resources, read_reports(slurm.run_srun(srun_argv(resources, names, probe)))


def srun_argv(resources: Resources, names: Sequence[str], module: Sequence[str]) -> list[str]:
    """Return the srun command that runs a module, with its arguments, once per node: on these nodes, or on any.

    Pure, except that it reads PYTHONPATH.
    """
    given = {key: getattr(resources, key) for key in ("mem", "account", "qos", "constraint", "exclude")}
    return [
        "srun", "--quit-on-interrupt", "--label", "--job-name=doctor", f"--partition={resources.partition}",
        f"--nodes={resources.nodes}", "--ntasks-per-node=1",
        *([f"--gpus-per-node={resources.gpus_per_node}"] if resources.gpus_per_node.count else []),
        # One CPU per rank is enough: a larger share might have to wait for other jobs.
        f"--cpus-per-task={resources.ranks_per_node}", f"--time={resources.time_limit.minutes}",
        *(f"--{key}={value}" for key, value in given.items() if value is not None),
        *(f"--{option}" for option in resources.sbatch),
        *([f"--nodelist={','.join(names)}"] if names else []),
        "--kill-on-bad-exit=0", "--wait=0", "--mpi=none",
        # SUBMITIT_EXECUTOR selects submitit's reader of the allocation. submitit's own scripts set it, too.
        "env", f"PYTHONPATH={own_pythonpath()}", "SUBMITIT_EXECUTOR=slurm", sys.executable, "-P", "-m", *module,
    ]  # fmt: skip


def read_reports(printed: str) -> list[NodeInfo]:
    """Return the NodeInfo that each task printed, in the order of tasks, from the output of `srun --label`. Pure."""
    lines = dict[int, list[str]]()
    for label, line in re.findall(r"^ *(\d+): ?(.*)$", printed, re.MULTILINE):
        lines.setdefault(int(label), []).append(line)
    found = []
    for task in sorted(lines):
        text = "\n".join(lines[task])
        with suppress(ValueError):  # a report that is cut off counts as no answer
            found.append(msgspec.json.decode(text[text.index("{") :], type=NodeInfo))
    return found
