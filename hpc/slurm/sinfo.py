"""Partitions and the states of nodes, from sinfo. Runs on login and compute nodes."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc.base.errors import TorchrelayError
from hpc.base.units import TimeLimit, slurm_seconds
from hpc.slurm import client

_UNUSABLE = ("down", "drain", "fail", "unknown", "inval", "maint")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The nodes of one kind in one partition: a line of sinfo."""

    name: str
    default: bool
    up: bool
    limit: TimeLimit | None
    default_limit: TimeLimit | None
    """Time limit of a job that requests none; None if the partition has no default."""
    max_nodes_per_job: int | None
    nodes: int
    cpus: int
    gpu_types: Mapping[str, int]
    """Number of GPUs of a node by type; the type of untyped GPUs is empty."""

    def gpus(self, gpu_type: str | None = None) -> int:
        """Return how many GPUs a node has: GPUs of `gpu_type` or, if that is None, GPUs of all types."""
        return sum(self.gpu_types.values()) if gpu_type is None else self.gpu_types.get(gpu_type, 0)


def partitions() -> list[Partition]:
    """Return the partitions that the user sees, once per kind of node. Raises TorchrelayError without an answer."""
    try:
        # Without --noconvert sinfo prints 1024 nodes as "1K".
        return parse_partitions(client.run("sinfo", "--noconvert", "--noheader", "--format=%P|%a|%l|%L|%s|%D|%c|%G"))
    except TorchrelayError as error:
        raise TorchrelayError(f"Slurm does not answer ({error}): try again later, or use --cluster local") from error


def parse_partitions(text: str) -> list[Partition]:
    """Parse `sinfo --format=%P|%a|%l|%L|%s|%D|%c|%G`."""
    partitions = []
    for line in text.splitlines():
        name, avail, limit, default, job_size, nodes, cpus, gres = line.split("|")
        most = job_size.split("-")[-1]
        partition = Partition(
            name=name.rstrip("*"), default=name.endswith("*"), up=avail == "up",
            limit=_time_limit(limit), default_limit=_time_limit(default),
            max_nodes_per_job=int(most) if most.isdigit() else None,
            nodes=int(nodes),
            gpu_types=gpus_in(gres),
            cpus=int(re.match(r"\d+", cpus)[0]),  # type: ignore[index]  # sinfo prints a number, or `8+`
        )  # fmt: skip
        partitions.append(partition)
    return partitions


def _time_limit(text: str) -> TimeLimit | None:
    seconds = slurm_seconds(text)
    return TimeLimit(seconds) if seconds else None


def gpus_in(gres: str) -> dict[str, int]:
    """Return the number of GPUs by type in a text such as `gpu:a100:4(S:0-1),nvme:1`. Untyped GPUs have the type ''."""
    counts = Counter[str]()
    for gpu_type, count in re.findall(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)", gres):
        counts[gpu_type] += int(count)
    return dict(counts)


def usable_nodes(partition: str | None) -> set[str]:
    """Return the nodes on which jobs may start now or later. `partition` may be a list, `a,b`; None is the default."""
    return {node for node, state in _node_states(partition).items() if not state.startswith(_UNUSABLE)}


def responding_nodes(partition: str | None) -> set[str]:
    """Return the `usable_nodes` that respond to Slurm now."""
    states = _node_states(partition).items()
    return {node for node, state in states if not state.startswith(_UNUSABLE) and not state.endswith("*")}


def idle_nodes(partition: str | None) -> set[str]:
    """Return the `usable_nodes` that are idle, so that a job may start on them now."""
    return {node for node, state in _node_states(partition).items() if state == "idle"}


def _node_states(partition: str | None) -> dict[str, str]:
    lines = [line.split("|") for line in client.run("sinfo", "--noheader", "--Node", "--format=%N|%P|%T").splitlines()]
    wanted = partition.split(",") if partition else [name.rstrip("*") for _, name, _ in lines if name.endswith("*")]
    return {node: state for node, name, state in lines if name.rstrip("*") in wanted}


def silent_nodes(nodes: Sequence[str]) -> set[str]:
    """Return which of `nodes` do not respond to Slurm, although Slurm has not marked them down yet."""
    states = _states_of_all_nodes()
    return {name for name in nodes if states.get(name, "").endswith("*") and not states[name].startswith("down")}


def dead_nodes(nodes: list[str]) -> list[str]:
    """Return which of `nodes` Slurm has marked down. A node that merely does not respond keeps its jobs."""
    states = _states_of_all_nodes()
    return [name for name in nodes if states.get(name, "").startswith("down")]


def _states_of_all_nodes() -> dict[str, str]:
    # Nodes are not selected with --nodes, because its answer may be minutes old.
    text = client.run("sinfo", "--noheader", "--Node", "--format=%N|%T")
    return dict(line.split("|") for line in text.splitlines())
