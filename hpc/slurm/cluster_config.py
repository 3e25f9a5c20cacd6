"""The whole configuration of a cluster, for `hpc doctor`. Runs on the login node."""

import getpass
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from hpc.base.errors import TorchrelayError, UserError
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
    max_submit_jobs: float | None = None
    """Maximum number of the user's running and pending jobs; inf without a limit, None if Slurm does not say."""


def query_cluster(name: str | None) -> ClusterConfig:
    """Query a cluster and one of its partitions: the one of this name, or the default one if `name` is None.

    Raises:
        UserError: there is no such partition.
        TorchrelayError: Slurm does not answer.
    """
    partitions = client.parse_records(client.run("scontrol", "--all", "--oneliner", "show", "partition"))
    config = client.show_config()
    return ClusterConfig(
        config=config,
        partition=choose_partition(name, partitions),
        partitions=partitions,
        max_submit_jobs=_max_submit_jobs() if "limits" in config.get("AccountingStorageEnforce", "") else inf,
    )


def _max_submit_jobs() -> float | None:
    """Return the lowest MaxSubmitJobs of the user's accounts; inf if none has one, None if sacctmgr does not answer."""
    user = f"user={getpass.getuser()}"
    try:
        text = client.run("sacctmgr", "--noheader", "--parsable2", "show", "associations", user, "format=MaxSubmitJobs")
    except TorchrelayError:
        return None
    return min((int(word) for word in text.split() if word.isdigit()), default=inf)


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
