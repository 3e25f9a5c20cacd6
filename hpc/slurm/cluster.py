"""What Slurm says of itself: its configuration, a partition, its nodes, its accounting. Runs on the login node."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc.core.errors import TorchrelayError, UserError
from hpc.slurm import client as slurm

Fields = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster in Slurm's own words. A field that this version does not have is not there."""

    config: Fields
    partition: Fields
    """The one that a run would use."""
    partitions: tuple[Fields, ...] = ()
    """All, those too that the user may not use: their jobs may preempt."""
    nodes: tuple[Fields, ...] = ()
    """Those of the partition."""
    accounting: str = ""
    """What sacct complains of; nothing if it works."""


def query_cluster(name: str | None) -> ClusterConfig:
    """Ask Slurm about itself and a partition, by default its own default.

    Raises:
        UserError: there is no such partition.
        TorchrelayError: Slurm does not answer.
    """
    partitions = parse_records(slurm.run(["scontrol", "--all", "--oneliner", "show", "partition"]))
    partition = choose_partition(name, partitions)
    nodes = parse_records(slurm.run(["scontrol", "--oneliner", "show", "node"]))
    return ClusterConfig(
        config=parse_config(slurm.run(["scontrol", "show", "config"])),
        partition=partition,
        partitions=partitions,
        nodes=tuple(one for one in nodes if partition["PartitionName"] in one.get("Partitions", "").split(",")),
        accounting=_complaint_of_sacct(),
    )


def choose_partition(name: str | None, partitions: Sequence[Fields]) -> Fields:
    """The partition of a name, or the default one.

    Raises:
        UserError: there is none; lists those that there are.
    """
    for one in partitions:
        if one.get("PartitionName") == name or (name is None and one.get("Default") == "YES"):
            return one
    problem = "the cluster has no default partition" if name is None else f"--partition {name!r} does not exist"
    names = ", ".join(one["PartitionName"] for one in partitions if "PartitionName" in one)
    raise UserError(f"{problem}: use --partition with one of {names}")


def _complaint_of_sacct() -> str:
    try:
        slurm.run(["sacct", "--noheader", "--allocations", "--starttime=now-1minute"])
    except TorchrelayError as error:
        return str(error)
    return ""


def parse_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`: a name, an equals sign and a value in a line. What stands twice counts once."""
    found = dict[str, str]()
    for match in re.finditer(r"^(\S+) *= *(.*?) *$", text, re.MULTILINE):
        found.setdefault(match[1], match[2])
    return found


def parse_records(text: str) -> tuple[dict[str, str], ...]:
    """Parse what `scontrol --oneliner show` prints: one record a line."""
    return tuple(slurm.parse_fields(line) for line in text.splitlines() if "=" in line)


def leading_number(fields: Fields, name: str) -> int | None:
    """The number that a field begins with (`30 sec`); None if it is not there or is no number."""
    match = re.match(r"\d+", fields.get(name, ""))
    return int(match[0]) if match else None
