"""Checks a submission before anything is queued. Runs on the login node.

Each check raises UserError with the flag, its value, and what to type. `resolve_resources` is pure.
"""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpc.base.errors import UserError
from hpc.base.files import nearest_existing
from hpc.base.kernel import automounted_at, file_system_type
from hpc.base.units import format_minutes, walltime_minutes
from hpc.run.ownership import who_may_rename
from hpc.run.spec import Cluster, Resources, RunSpec
from hpc.slurm.sinfo import Partition
from hpc.submissions.runs_storage import LOST, Feature, has_been_seen_by_nodes, missing_features

_NODE_LOCAL = (Path("/tmp"), Path("/dev/shm"))  # noqa: S108 - these are refused, not used
# The space that the files of a run need besides its checkpoints.
_MIN_FREE_BYTES = 64 * 2**20


def resolve_resources(asked: Resources, partitions: list[Partition], spares: int = 0) -> Resources:
    """Complete the resources with the cluster's defaults. Raises UserError if the partition cannot provide them."""
    kinds = _chosen_partition(asked.partition, partitions)
    name = kinds[0].name
    fitting = [kind for kind in kinds if kind.gpus(asked.gpu_type) >= asked.num_gpus]
    if not fitting:
        raise UserError(_no_such_gpus(asked, kinds, partitions))
    _check_nodes(asked, spares, fitting, some=len(fitting) < len(kinds))
    cpus_per_gpu, most = asked.cpus_per_gpu, max(kind.cpus for kind in fitting) // asked.ranks_per_node
    if cpus_per_gpu is None:
        # The default is an equal share of the smallest node.
        cpus_per_gpu = max(1, min(kind.cpus // (kind.gpus() if asked.num_gpus else 1) for kind in fitting))
    elif cpus_per_gpu > most:
        raise UserError(
            f"--cpus-per-gpu is {cpus_per_gpu}, but partition {name} has {most} per rank with "
            f"--gpus-per-node {asked.gpus_per_node}: use --cpus-per-gpu {most} or fewer"
        )
    minutes = _limit_minutes(asked, fitting)
    if asked.given_time_min and walltime_minutes(asked.given_time_min) > minutes:
        raise UserError(
            f"--time-min is {asked.time_min}, but the time limit is {format_minutes(minutes)}: use a shorter "
            "--time-min or a longer --time"
        )
    return dataclasses.replace(asked, partition=name, cpus_per_gpu=cpus_per_gpu, time=format_minutes(minutes))


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
    by_type = {f"{name}:{count}" for kind in kinds for name, count in kind.gpu_types.items() if name}
    total = max(kind.gpus() for kind in kinds)
    if asked.gpu_type and by_type:
        has, advice = ", ".join(sorted(by_type)), "one of these, or fewer"
    elif total:
        has, advice = f"{total} without a type" if asked.gpu_type else f"{total}", f"--gpus-per-node {total} or fewer"
    else:
        has, advice = "0", "--gpus-per-node 0 to train on CPUs"
    others = sorted({kind.name for kind in partitions if kind.gpus(asked.gpu_type) >= asked.num_gpus})
    other = f", or one of the partitions {', '.join(others)}" if others else ""
    return (
        f"--gpus-per-node is {asked.gpus_per_node}, but partition {kinds[0].name} has {has} per node: "
        f"use {advice}{other}"
    )


def _check_nodes(asked: Resources, spares: int, kinds: list[Partition], *, some: bool) -> None:
    """Refuse more nodes than the partition has, or than it allows for one job."""
    has = sum(kind.nodes for kind in kinds)
    most = min([has, *(kind.max_nodes_per_job for kind in kinds if kind.max_nodes_per_job is not None)])
    if asked.max_nodes + spares > most:
        gives = f"has {has}" if most == has else f"allows {most} per job"
        suffix = f" with {asked.num_gpus} or more {asked.gpu_type or ''} GPUs".replace("  ", " ") if some else ""
        given = f"--nodes is {asked.nodes}" + (f" and --spares {spares}" if spares else "")
        advice = f"--nodes {most}" if asked.max_nodes > most else f"--spares {most - asked.max_nodes}"
        raise UserError(f"{given}, but partition {kinds[0].name} {gives}{suffix}: use {advice} or fewer")


def _limit_minutes(asked: Resources, kinds: list[Partition]) -> int:
    """Return the time limit in minutes: --time, else the partition's default, else its limit, but at most a day."""
    limit = min((kind.limit_minutes for kind in kinds if kind.limit_minutes is not None), default=None)
    if asked.time is None:
        return kinds[0].default_minutes or min(asked.limit_minutes, limit or asked.limit_minutes)
    minutes = walltime_minutes(asked.time)
    if limit is not None and minutes > limit:
        longest = format_minutes(limit)
        raise UserError(
            f"--time is {asked.time}, but partition {kinds[0].name} allows {longest}: use --time {longest} or less "
            "(at the time limit, the run continues in a new attempt)"
        )
    return minutes


def check_setup(lines: Sequence[str], cluster: Cluster) -> None:
    """Refuse --setup with --cluster local, and lines that are not valid Bash."""
    if lines and cluster == "local":
        raise UserError(
            f"--setup is {lines[0]!r}, but --cluster local has no batch script: type it in this shell before hpc submit"
        )
    for line in lines:
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            problem = done.stderr.strip().partition("\n")[0].removeprefix("bash: -c: ")
            raise UserError(f"--setup {line!r} is not valid Bash ({problem}): write each --setup as a whole command")


def check_recovery(spec: RunSpec) -> None:
    """Refuse flags without effect, and a --signal-before or --grace-period that is not shorter than the time limit."""
    if spec.recovery.spares and spec.cluster == "local":
        raise UserError(f"--spares is {spec.recovery.spares}, but --cluster local has no spare nodes: leave it out")
    if spec.recovery.continue_with != "auto" and spec.cluster == "local":
        way = spec.recovery.continue_with
        raise UserError(f"--continue-with is {way}, but --cluster local always requeues: leave it out")
    if spec.network.interface and spec.cluster == "local":
        raise UserError(
            f"--interface is {spec.network.interface}, but --cluster local has no network between nodes: leave it out"
        )
    if spec.stop_signal and not spec.program.isolated:
        given = spec.recovery.stop_signal
        raise UserError(f"--stop-signal is {given}, but it applies only to your own script: leave it out")
    least = spec.resources.given_time_min
    longer, may_be = ("--time-min", "may be") if least else ("--time", "is")
    minutes = walltime_minutes(least) if least else spec.resources.limit_minutes
    flag, text = "--signal-before", spec.recovery.signal_before
    if text is None:
        flag, text = "--grace-period", spec.recovery.grace_period
    if text is not None and spec.stop_lead_seconds >= 60 * minutes:
        raise UserError(
            f"{flag} is {text}, but the time limit {may_be} {least or format_minutes(minutes)}: use a shorter {flag} "
            f"or a longer {longer}"
        )


def local_resources(asked: Resources) -> Resources:
    """Return the resources for --cluster local, whose simulated nodes share the CPUs of this machine."""
    if asked.gpu_type:
        raise UserError(
            f"--gpus-per-node is {asked.gpus_per_node}, but --cluster local does not know types of GPUs: "
            f"use --gpus-per-node {asked.num_gpus}"
        )
    share = (os.cpu_count() or 1) // (asked.max_nodes * asked.ranks_per_node)
    time = format_minutes(asked.limit_minutes)
    return dataclasses.replace(asked, cpus_per_gpu=asked.cpus_per_gpu or max(1, share), time=time)


def check_runs_dir(runs_dir: Path, *, on_cluster: bool) -> None:
    """Refuse a runs directory that is not shared, not writable, or full, or in which others may replace a run."""
    if on_cluster:
        check_is_shared("--runs-dir", runs_dir.expanduser())
    real = runs_dir.expanduser().resolve()
    if any(character in str(real) for character in "%\\\n"):
        raise UserError(f"--runs-dir {str(runs_dir)!r}: Slurm replaces % and \\ in file names; use another path")
    existing = nearest_existing(real)
    if not existing.is_dir():
        raise UserError(f"--runs-dir {runs_dir}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--runs-dir {runs_dir}: {existing} is not writable; use a directory of your own")
    if existing == real and (problem := who_may_rename(real)):
        raise UserError(f"--runs-dir {runs_dir}: {problem}; use a directory of your own")
    free = shutil.disk_usage(existing).free
    if free < _MIN_FREE_BYTES:
        raise UserError(
            f"--runs-dir {runs_dir}: its file system is full ({free // 2**20} MB free): free some space, or use another"
        )


def runs_dir_warnings(runs_dir: Path, *, on_cluster: bool) -> list[str]:
    """Return warnings about the runs directory that do not prevent a submission.

    Raises:
        UserError: its file system lacks a feature that every run needs.
    """
    real = runs_dir.expanduser().resolve()
    missing = missing_features(real)
    where = f"--runs-dir {runs_dir}: its file system ({file_system_type(real)}) has no"
    found = [f"{where} {feature}: {LOST[feature]}; use a directory on other storage" for feature in missing]
    if Feature.HARD_LINKS in missing:
        raise UserError(found[0])
    point = automounted_at(real)
    if on_cluster and point is not None and not has_been_seen_by_nodes(real):
        found.append(
            f"--runs-dir {real} is below {point}, where this machine mounts on demand (autofs): unless the nodes do "
            f"the same, no run starts; check with hpc doctor --nodes 1 --runs-dir {real}, or use another path to it"
        )
    return found


def is_node_local(path: Path) -> bool:
    """Return whether a path is in /tmp or /dev/shm, which other nodes cannot see."""
    return any(path.resolve().is_relative_to(local) for local in _NODE_LOCAL)


def check_is_shared(flag: str, path: Path | None) -> None:
    """Refuse a path that other nodes cannot see."""
    if path is not None and is_node_local(path):
        raise UserError(f"{flag} {path} is on this node's own disk: use a directory that all nodes share")
