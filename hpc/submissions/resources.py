"""Resolves the cluster, resources and device of a run: what was not typed gets a value. Runs on the login node."""

import dataclasses
import os
from pathlib import Path
from typing import Literal

from hpc.base.errors import UserError
from hpc.base.node_info import TorchBuild
from hpc.base.units import TimeLimit
from hpc.run.spec import Cluster, DeviceChoice, Resources
from hpc.slurm import client as slurm
from hpc.slurm import sinfo
from hpc.slurm.sinfo import Partition

ClusterFlag = Literal["auto", "slurm", "local"]
_SLURM_ONLY = ("partition", "account", "qos", "constraint", "exclude", "mem", "time_min", "sbatch")
SLURM_FLAGS = frozenset(name.replace("_", "-") for name in (*_SLURM_ONLY, "setup"))
"""Flags for which --cluster local ignores the user's defaults."""
# One of these exists if a GPU's driver is loaded.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def choose_cluster(asked: ClusterFlag, resources: Resources, *, in_terminal: bool) -> Cluster:
    """Return the cluster that --cluster asks for. `auto` chooses Slurm if it is available, and if not, this machine.

    `in_terminal` says whether the command was typed in a terminal, and not started by cron, for example.

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


def complete(asked: Resources, cluster: Cluster, spares: int) -> Resources:
    """Complete the resources of a run. Raises UserError if the cluster cannot provide them."""
    return resolve_resources(asked, sinfo.partitions(), spares) if cluster == "slurm" else local_resources(asked)


def resolve_resources(asked: Resources, partitions: list[Partition], spares: int = 0) -> Resources:
    """Complete the resources with the cluster's defaults. Raises UserError if the partition cannot provide them."""
    kinds = _chosen_partition(asked.partition, partitions)
    name = kinds[0].name
    fitting = [kind for kind in kinds if kind.gpus(asked.gpus_per_node.kind) >= asked.gpus_per_node.count]
    if not fitting:
        raise UserError(_no_such_gpus(asked, kinds, partitions))
    _check_nodes(asked, spares, fitting, some=len(fitting) < len(kinds))
    cpus_per_gpu, most = asked.cpus_per_gpu, max(kind.cpus for kind in fitting) // asked.ranks_per_node
    if cpus_per_gpu is None:
        # The default is an equal share of the smallest node.
        cpus_per_gpu = max(1, min(kind.cpus // (kind.gpus() if asked.gpus_per_node.count else 1) for kind in fitting))
    elif cpus_per_gpu > most:
        raise UserError(
            f"--cpus-per-gpu is {cpus_per_gpu}, but partition {name} has {most} per rank with "
            f"--gpus-per-node {asked.gpus_per_node}: use --cpus-per-gpu {most} or fewer"
        )
    limit, least = _time_limit(asked, fitting), asked.time_min and asked.time_min.typed
    if least and least.seconds > limit.seconds:
        raise UserError(
            f"--time-min is {least}, but the time limit is {limit}: use a shorter --time-min or a longer --time"
        )
    return dataclasses.replace(asked, partition=name, cpus_per_gpu=cpus_per_gpu, time=limit)


def _chosen_partition(name: str | None, partitions: list[Partition]) -> list[Partition]:
    """Return the partition `name` (None: the default partition) as a list with an entry for each kind of node."""
    names = list(dict.fromkeys(kind.name for kind in partitions))
    chosen = [kind for kind in partitions if (kind.default if name is None else kind.name == name)]
    if not chosen:
        problem = "the cluster has no default partition" if name is None else f"--partition {name!r} does not exist"
        raise UserError(f"{problem}: use --partition with one of {', '.join(names)}")
    if not any(kind.up for kind in chosen):
        others = [kind.name for kind in partitions if kind.up]
        advice = f"use --partition with one of {', '.join(others)}" if others else "all others are down, too; try later"
        raise UserError(f"partition {chosen[0].name} is down: {advice}")
    return chosen


def _no_such_gpus(asked: Resources, kinds: list[Partition], partitions: list[Partition]) -> str:
    """Return the error message for a partition in which no node has the GPUs that were asked for."""
    gpus, types = asked.gpus_per_node, (item for kind in kinds for item in kind.gpu_types.items())
    has = " or ".join(sorted({f"{name}:{count}".removeprefix(":") for name, count in types})) or "0"
    others = sorted({kind.name for kind in partitions if kind.gpus(gpus.kind) >= gpus.count})
    other = f", or one of the partitions {', '.join(others)}" if others else ""
    return (
        f"--gpus-per-node is {gpus}, but partition {kinds[0].name} has {has} per node: use --gpus-per-node {has}{other}"
    )


def _check_nodes(asked: Resources, spares: int, kinds: list[Partition], *, some: bool) -> None:
    """Refuse more nodes than the partition has, or than it allows for one job."""
    has = sum(kind.nodes for kind in kinds)
    most = min([has, *(kind.max_nodes_per_job for kind in kinds if kind.max_nodes_per_job is not None)])
    if asked.nodes.most + spares > most:
        gives = f"has {has}" if most == has else f"allows {most} per job"
        suffix = f" with --gpus-per-node {asked.gpus_per_node}" if some else ""
        typed = f"--nodes is {asked.nodes}" + (f" and --spares {spares}" if spares else "")
        raise UserError(f"{typed}, but partition {kinds[0].name} {gives}{suffix}: use {most} or fewer")


def _time_limit(asked: Resources, kinds: list[Partition]) -> TimeLimit:
    """Return the time limit: --time, or else the partition's default, or else its longest limit, but at most a day."""
    longest = min((kind.limit for kind in kinds if kind.limit), key=lambda limit: limit.seconds, default=None)
    if asked.time is None and kinds[0].default_limit:
        return kinds[0].default_limit
    if longest is None or asked.time_limit.seconds <= longest.seconds:
        return asked.time_limit
    if asked.time is None:
        return longest
    raise UserError(
        f"--time is {asked.time}, but partition {kinds[0].name} allows {longest}: use --time {longest} or less "
        "(at the time limit, the run continues in a new attempt)"
    )


def local_resources(asked: Resources) -> Resources:
    """Return the resources for --cluster local, whose simulated nodes share the CPUs of this machine."""
    if asked.gpus_per_node.kind:
        raise UserError(
            f"--gpus-per-node is {asked.gpus_per_node}, but --cluster local does not know types of GPUs: "
            f"use --gpus-per-node {asked.gpus_per_node.count}"
        )
    share = (os.cpu_count() or 1) // (asked.nodes.most * asked.ranks_per_node)
    return dataclasses.replace(asked, cpus_per_gpu=asked.cpus_per_gpu or max(1, share), time=asked.time_limit)


def resolve_device(asked: DeviceChoice, gpus_per_node: int, cluster: Cluster, build: TorchBuild | None) -> DeviceChoice:
    """Return the --device of a run: `auto` becomes `cuda` if GPUs were requested and can exist.

    GPUs cannot exist on a testbed, nor, with --cluster local, on a machine without a driver. `build` is the build of
    torch that the ranks import; None if unknown.

    Raises:
        UserError: the ranks would not get GPUs, or their torch cannot use them.
    """
    if gpus_per_node == 0:
        if asked == "cuda":
            raise UserError("--device is cuda, but --gpus-per-node 0 asks for no GPUs: leave one of them out")
        return asked  # with auto, ranks use a part of a GPU if --sbatch gres=shard:1 gives them one
    simulated = slurm.is_testbed() if cluster == "slurm" else not any(driver.exists() for driver in _DRIVERS)
    if asked == "cpu" or (asked == "auto" and simulated):
        return asked
    if build is not None and build.accelerator is None:
        raise UserError(
            f"--gpus-per-node is {gpus_per_node}, but this environment's torch {build.version} is built for CPUs "
            "alone: install one for GPUs, or use --device cpu"
        )
    return "cuda"
