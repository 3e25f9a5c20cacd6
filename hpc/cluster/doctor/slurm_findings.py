"""Queries a cluster's configuration for `hpc doctor`, and judges it by a table of checks. Runs on the login node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc.base.errors import UserError
from hpc.cluster.doctor.findings import Check, Finding, costs, note, ok
from hpc.run.stop_times import KILL_WAIT_SECONDS, save_timeout_seconds
from hpc.slurm import client
from hpc.slurm.client import (
    LONG_REQUEUE_DELAY_SECONDS,
    Fields,
    expedites_requeues,
    leading_number,
    requeue_delay_seconds,
)

_MIN_SAVE_SECONDS = 10.0
_LONG_TIMEOUT_SECONDS = 60


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


def _ask(cluster: ClusterConfig, setting: str) -> str:
    name = cluster.partition.get("PartitionName", "...")
    return f"ask the administrators for {setting} in the line PartitionName={name} of slurm.conf"


def may_be_preempted(cluster: ClusterConfig) -> bool | None:
    """Return whether Slurm may end jobs of the partition to start others; None if the configuration does not tell."""
    kind, mode = cluster.config.get("PreemptType"), cluster.partition.get("PreemptMode")
    if kind is None or mode is None or kind.endswith("/qos"):
        return None
    own = leading_number(cluster.partition, "PriorityTier") or 0
    higher = any((leading_number(other, "PriorityTier") or 0) > own for other in cluster.partitions)
    return not kind.endswith("/none") and higher and mode != "OFF" and "SUSPEND" not in mode


def _preemption(cluster: ClusterConfig) -> Finding | None:
    config, partition = cluster.config, cluster.partition
    if config.get("PreemptType", "").endswith("/qos"):
        return note(
            "PreemptType=preempt/qos: the QOS defines the GraceTime",
            "if a save takes longer than that, the steps since the last checkpoint are lost",
            "check with sacctmgr show qos format=name,preempt,preemptmode,gracetime",
        )
    preempted, grace = may_be_preempted(cluster), leading_number(partition, "GraceTime")
    if preempted is None or grace is None:
        return None
    if not preempted:
        return ok("jobs of this partition are not preempted")
    seconds = save_timeout_seconds(client.grace_seconds(partition, config) or KILL_WAIT_SECONDS)
    value = f"GraceTime={grace}: {seconds:g} s to save on preemption"
    if seconds >= _MIN_SAVE_SECONDS and grace > 0:
        return ok(value)
    return note(
        value,
        "if a save takes longer, the steps since the last checkpoint are lost",
        f"{_ask(cluster, 'GraceTime=60')}; a shorter --checkpoint-every reduces the loss",
    )


def _preempt_mode(cluster: ClusterConfig) -> Finding | None:
    mode, partition = cluster.partition.get("PreemptMode"), cluster.partition.get("PartitionName", "")
    if mode is None:
        return None
    value = f"PreemptMode={mode} in partition {partition}"
    if "CANCEL" in mode and may_be_preempted(cluster) is not False:
        return note(
            value,
            "Slurm ends a preempted job for good: the agents of the run must submit a new job before it is killed",
            "start hpc supervise: it submits a new job for a run whose agents did not manage to",
        )
    return ok(value)


def _slurmd_timeout(cluster: ClusterConfig) -> Finding | None:
    seconds = leading_number(cluster.config, "SlurmdTimeout")
    if seconds is None:
        return None
    value, ask = f"SlurmdTimeout={seconds} s", "ask the administrators for SlurmdTimeout=60 in slurm.conf"
    if seconds == 0:
        return costs(value, "Slurm never notices a dead node: a run on one node hangs forever when it dies", ask)
    if seconds <= _LONG_TIMEOUT_SECONDS:
        return ok(value)
    return note(
        value,
        f"Slurm notices a dead node after {seconds} s. The node agents notice after 5 s, but a run on one node has no "
        "other agent and waits",
        f"start hpc supervise, which notices after a minute; or {ask}",
    )


def _requeue_delay(cluster: ClusterConfig) -> Finding | None:
    if "AuthInfo" not in cluster.config:
        return None
    if expedites_requeues(cluster.config):
        return ok("none for the jobs of runs (enable_expedited_requeue)")
    seconds = requeue_delay_seconds(cluster.config)
    value = f"{seconds} s"
    if seconds <= LONG_REQUEUE_DELAY_SECONDS:
        return ok(value)
    return note(
        value,
        "Slurm holds a requeued job that long, so after a preemption or its time limit a run continues in a new job, "
        "which has another id and no age in the queue",
        "use --continue-with requeue and hpc supervise to keep the job; or ask the administrators for "
        "SlurmctldParameters=enable_expedited_requeue, or for SchedulerParameters=requeue_delay=5 (before Slurm 25.11: "
        "AuthInfo=cred_expire=15), in slurm.conf",
    )


def _submits_from_nodes(cluster: ClusterConfig) -> Finding | None:
    given = cluster.partition.get("AllocNodes")
    if given is None:
        return None
    if given == "ALL":
        return ok("AllocNodes=ALL")
    return note(
        f"AllocNodes={given}",
        "unless these include the compute nodes, a run that lost its first node, or too many nodes, restarts only "
        "after Slurm has noticed (SlurmdTimeout)",
        _ask(cluster, "AllocNodes=ALL"),
    )


def _private_tmp(cluster: ClusterConfig) -> Finding | None:
    config = cluster.config
    kind = config.get("JobContainerType", config.get("NamespaceType"))  # the new name since Slurm 25.11
    if kind is None:
        return None
    if kind.rpartition("/")[2] not in {"tmpfs", "linux"}:
        return ok("jobs share the nodes' /tmp")
    return note(
        kind,
        "each job has its own /tmp, removed at its end: every new job of a run copies the data again",
        "use --stage-dir with a directory on the nodes' disks that Dirs= in job_container.conf, or namespace.yaml, "
        "does not list",
    )


OF_SLURM: Mapping[str, Check[ClusterConfig]] = {
    "preemption": _preemption,
    "PreemptMode": _preempt_mode,
    "SlurmdTimeout": _slurmd_timeout,
    "requeue delay": _requeue_delay,
    "AllocNodes": _submits_from_nodes,
    "private /tmp": _private_tmp,
}
