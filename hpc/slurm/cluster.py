"""Slurm's configuration, its partitions and nodes, and whether sacct works. Runs on the login node."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc.core.errors import TorchrelayError, UserError
from hpc.slurm import client as slurm

Fields = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster's configuration, in Slurm's fields. Fields that its version lacks are missing."""

    config: Fields
    partition: Fields
    """The one that a run would use."""
    partitions: tuple[Fields, ...] = ()
    """All, including those that the user may not use: their jobs may preempt."""
    sacct_error: str = ""
    """Empty if sacct works."""


def query_cluster(name: str | None) -> ClusterConfig:
    """Query a cluster and one of its partitions, by default its default.

    Raises:
        UserError: there is no such partition.
        TorchrelayError: Slurm does not answer.
    """
    partitions = parse_records(slurm.run("scontrol", "--all", "--oneliner", "show", "partition"))
    partition = choose_partition(name, partitions)
    return ClusterConfig(
        config=parse_config(slurm.run("scontrol", "show", "config")),
        partition=partition,
        partitions=partitions,
        sacct_error=_sacct_error(),
    )


def choose_partition(name: str | None, partitions: Sequence[Fields]) -> Fields:
    """The partition with a name, or the default one.

    Raises:
        UserError: there is none; lists the names.
    """
    for partition in partitions:
        if partition.get("PartitionName") == name or (name is None and partition.get("Default") == "YES"):
            return partition
    problem = "the cluster has no default partition" if name is None else f"--partition {name!r} does not exist"
    names = ", ".join(fields["PartitionName"] for fields in partitions if "PartitionName" in fields)
    raise UserError(f"{problem}: use --partition with one of {names}")


def _sacct_error() -> str:
    try:
        slurm.run("sacct", "--noheader", "--allocations", "--starttime=now-1minute")
    except TorchrelayError as error:
        return str(error)
    return ""


def parse_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`: lines `Name = value`. Of repeated names the first counts."""
    found = dict[str, str]()
    for match in re.finditer(r"^(\S+) *= *(.*?) *$", text, re.MULTILINE):
        found.setdefault(match[1], match[2])
    return found


def parse_records(text: str) -> tuple[dict[str, str], ...]:
    """Parse the output of `scontrol --oneliner show`: one record per line."""
    return tuple(slurm.parse_fields(line) for line in text.splitlines() if "=" in line)


def leading_number(fields: Fields, name: str) -> int | None:
    """The number at the beginning of a field (`30 sec`); None if there is none."""
    match = re.match(r"\d+", fields.get(name, ""))
    return int(match[0]) if match else None
