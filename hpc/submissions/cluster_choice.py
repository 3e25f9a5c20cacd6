"""Chooses between Slurm and this machine, and refuses likely mistakes. Runs on the login node."""

import os
from typing import Literal

from hpc.base.errors import UserError
from hpc.run.spec import Cluster, Resources
from hpc.slurm import client as slurm

ClusterFlag = Literal["auto", "slurm", "local"]
_SLURM_ONLY = ("partition", "account", "qos", "constraint", "exclude", "mem", "time_min", "sbatch")
SLURM_FLAGS = frozenset(name.replace("_", "-") for name in (*_SLURM_ONLY, "setup"))
"""Flags for which --cluster local ignores the user's defaults."""


def choose_cluster(asked: ClusterFlag, resources: Resources, *, in_terminal: bool) -> Cluster:
    """Return the cluster that --cluster asks for. `auto` chooses Slurm if it is available, and if not, this machine.

    Args:
        asked: the value of --cluster.
        resources: the run's resources.
        in_terminal: whether the command was typed in a terminal, and not started by cron, for example.

    Raises:
        UserError: there is no Slurm, although `slurm` was asked for. Or `auto` would choose this machine, although a
            flag suggests Slurm or `in_terminal` is False.
    """
    if asked == "local":
        return "local"
    reason = slurm.why_unavailable()
    if reason is None:
        return "slurm"
    if asked == "slurm":
        raise UserError(f"--cluster slurm, but there is no Slurm here ({reason}): use --cluster local")
    meant = slurm_only(resources) + ([f"--time {resources.time}"] if resources.time else [])
    if meant:
        raise UserError(
            f"{meant[0]} needs Slurm, but there is no Slurm here ({reason}): type this on a login node of the cluster, "
            "or leave it out and use --cluster local to train on this machine"
        )
    if not in_terminal:
        raise UserError(f"there is no Slurm here ({reason}): use --cluster local to train on this machine")
    return "local"


def slurm_only(resources: Resources) -> list[str]:
    """Return the given flags of `resources` that apply only to Slurm, each with its value."""
    typed = [f"--gpus-per-node {resources.gpus_per_node}"] if resources.gpus_per_node.kind else []
    values = [(name, getattr(resources, name)) for name in _SLURM_ONLY]
    return typed + [
        f"--{name.replace('_', '-')} {value[0] if name == 'sbatch' else value}" for name, value in values if value
    ]


def this_machine() -> str:
    """Return a phrase with the name of this machine and its number of CPUs."""
    cpus = len(os.sched_getaffinity(0))
    return f"this machine, {os.uname().nodename} ({cpus} CPU{'s' if cpus > 1 else ''})"
