"""The whole configuration of a cluster, for `hpc doctor`. Runs on the login node."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpc.base.errors import UserError
from hpc.slurm import client
from hpc.slurm.client import Fields


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster's configuration, in Slurm's fields. Fields that the cluster's Slurm lacks are missing."""

    config: Fields
    partition: Fields
    """The partition that a run would use."""
    partitions: tuple[Fields, ...] = ()
    """All partitions, including those that the user may not use, because their jobs may preempt the user's."""


def query_cluster(name: str | None) -> ClusterConfig:
    """Query a cluster and one of its partitions: the one of this name, or the default one if `name` is None.

    Raises:
        UserError: there is no such partition.
        TorchrelayError: Slurm does not answer.
    """
    partitions = client.parse_records(client.run("scontrol", "--all", "--oneliner", "show", "partition"))
    partition = choose_partition(name, partitions)
    return ClusterConfig(config=client.show_config(), partition=partition, partitions=partitions)


def choose_partition(name: str | None, partitions: Sequence[Fields]) -> Fields:
    """Return the partition `name`, or the default one if None. Raises UserError, with all names, if it is missing."""
    for partition in partitions:
        if partition.get("PartitionName") == name or (name is None and partition.get("Default") == "YES"):
            return partition
    problem = "the cluster has no default partition" if name is None else f"--partition {name!r} does not exist"
    names = ", ".join(fields["PartitionName"] for fields in partitions if "PartitionName" in fields)
    raise UserError(f"{problem}: use --partition with one of {names}")


def leading_number(fields: Fields, name: str) -> int | None:
    """Return the number with which a field begins (`30 sec`); None if the field begins with no number or is missing."""
    match = re.match(r"\d+", fields.get(name, ""))
    return int(match[0]) if match else None
