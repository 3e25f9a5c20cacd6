"""The findings of `hpc doctor` about configurations and machines."""

from dataclasses import replace
from typing import Any

import pytest

from hpc.base.errors import UserError
from hpc.base.node_info import NodeInfo
from hpc.cluster.doctor.findings import OF_LOGIN, Finding, LoginNode, Severity, judge, merge
from hpc.cluster.doctor.node_findings import OF_NODE, compare
from hpc.cluster.doctor.slurm_findings import OF_SLURM, ClusterConfig, choose_partition
from hpc.slurm.client import leading_number, parse_config, parse_records

# As Slurm 22.05.8 prints them, shortened.
CONFIG = """Configuration data as of 2026-11-21T18:38:39
AccountingStorageType   = accounting_storage/none
AuthInfo                = socket=/run/munge/munge.socket
JobContainerType        = job_container/none
JobRequeue              = 1
KillWait                = 15 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
PropagateResourceLimits = ALL
PropagateResourceLimitsExcept = (null)
PowerPlugin             =\x20
SlurmctldHost[0]        = login(10.77.0.254)
SlurmctldParameters     = (null)
SlurmdTimeout           = 300 sec
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at login is UP
"""
PARTITIONS = (
    "PartitionName=gpu AllowGroups=ALL AllocNodes=ALL Default=YES GraceTime=20 Hidden=NO Nodes=gpu[01-06] "
    "PriorityTier=1 OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TRES=cpu=48,mem=192G\n"
    "PartitionName=urgent AllocNodes=ALL Default=NO GraceTime=0 PriorityTier=10 PreemptMode=OFF State=UP\n"
)
# What other versions print differently.
NEWER = """JobRequeue              = 1

Cgroup Support Configuration:
ConstrainRAMSpace       = yes
JobRequeue              = 0
"""


def cluster(config: dict[str, str], partition: dict[str, str]) -> ClusterConfig:
    gpu, urgent = parse_records(PARTITIONS)
    own = {**gpu, **partition}
    return ClusterConfig(config={**parse_config(CONFIG), **config}, partition=own, partitions=(own, urgent))


def one(found: list[Finding], check: str) -> Finding:
    (finding,) = [finding for finding in found if finding.check == check]
    return finding


def test_configuration_as_printed() -> None:
    config = parse_config(CONFIG)
    assert (config["SLURM_VERSION"], config["PowerPlugin"], leading_number(config, "KillWait")) == ("22.05.8", "", 15)
    assert (leading_number(config, "SlurmctldParameters"), leading_number(config, "Nothing")) == (None, None)
    assert parse_config(NEWER)["JobRequeue"] == "1", "later sections replace nothing"
    assert parse_config("") == {}


def test_partition_is_the_one_named_or_the_default() -> None:
    partitions = parse_records(PARTITIONS)
    assert choose_partition(None, partitions)["PartitionName"] == "gpu"
    assert choose_partition("urgent", partitions)["GraceTime"] == "0"
    with pytest.raises(UserError, match="--partition 'gpux' does not exist: use --partition with one of gpu, urgent"):
        choose_partition("gpux", partitions)
    with pytest.raises(UserError, match="no default partition"):
        choose_partition(None, partitions[1:])


NO_GRACE = {"GraceTime": "0"}
NOT_PREEMPTED = {"PreemptMode": "OFF"}
TEXTS = {
    "qos": {"PreemptType": "preempt/qos"},
    "wait 60": {"KillWait": "60 sec"},
    "expire": {"AuthInfo": "socket=/x,cred_expire=600"},
    "own delay": {"AuthInfo": "cred_expire=600", "SchedulerParameters": "bf_interval=5,requeue_delay=5"},
}


@pytest.mark.parametrize(
    ("check", "config", "partition", "severity", "words"),
    [
        ("preemption", {}, {}, "ok", ["GraceTime=20: 10 s to save"]),
        ("preemption", {}, NO_GRACE, "note", ["7.5 s to save", "PartitionName=gpu", "GraceTime=60"]),
        ("preemption", TEXTS["wait 60"], NO_GRACE, "note", ["50 s to save"]),
        ("preemption", {}, NOT_PREEMPTED, "ok", ["not preempted"]),
        ("preemption", {}, {**NO_GRACE, "PriorityTier": "10"}, "ok", ["not preempted"]),
        ("preemption", TEXTS["qos"], NO_GRACE, "note", ["sacctmgr show qos"]),
        ("PreemptMode", {}, {}, "ok", ["PreemptMode=REQUEUE"]),
        ("PreemptMode", {}, {"PreemptMode": "CANCEL"}, "note", ["partition gpu", "hpc supervise"]),
        ("PreemptMode", {}, {"PreemptMode": "GANG,SUSPEND"}, "ok", []),
        ("SlurmdTimeout", {}, {}, "note", ["after 300 s", "after 5 s", "one node", "SlurmdTimeout=60"]),
        ("SlurmdTimeout", {"SlurmdTimeout": "60 sec"}, {}, "ok", []),
        ("SlurmdTimeout", {"SlurmdTimeout": "0 sec"}, {}, "cost", ["never"]),
        ("requeue delay", {}, {}, "note", ["120 s", "in a new job", "--continue-with requeue"]),
        ("requeue delay", TEXTS["expire"], {}, "note", ["600 s", "requeue_delay=5"]),
        ("requeue delay", TEXTS["own delay"], {}, "ok", []),
        ("requeue delay", {"SlurmctldParameters": "enable_expedited_requeue"}, {}, "ok", ["none"]),
        ("AllocNodes", {}, {"AllocNodes": "login[1-2]"}, "note", ["login[1-2]", "PartitionName=gpu"]),
        ("private /tmp", {}, {}, "ok", []),
        ("private /tmp", {"JobContainerType": "job_container/tmpfs"}, {}, "note", ["--stage-dir"]),
    ],
)  # fmt: skip
def test_finding_about_slurm(
    check: str, config: dict[str, str], partition: dict[str, str], severity: str, words: list[str]
) -> None:
    finding = one(judge(OF_SLURM, cluster(config, partition), "cluster"), check)
    text = f"{finding.value} {finding.cost} {finding.what_to_do}"
    assert finding.severity == severity, text
    assert [word for word in words if word not in text] == [], text
    if finding.severity in {Severity.COST, Severity.NOTE}:
        assert finding.cost
        assert finding.what_to_do


def test_newer_name_of_a_setting_is_known() -> None:
    newer = ClusterConfig(config={"NamespaceType": "namespace/tmpfs"}, partition={})
    assert one(judge(OF_SLURM, newer, "cluster"), "private /tmp").severity is Severity.NOTE


def test_what_is_not_reported_is_not_judged() -> None:
    assert judge(OF_SLURM, ClusterConfig(config={}, partition={}), "cluster") == []
    unlimited = judge(OF_SLURM, cluster({}, {"GraceTime": "UNLIMITED"}), "cluster")
    assert "preemption" not in {finding.check for finding in unlimited}
    assert "preflight" not in {finding.check for finding in judge(OF_NODE, replace(NODE, world_size=0), "gpu01")}
    login = judge(OF_LOGIN, replace(LOGIN, runs_type=None), "login")
    assert "runs directory" not in {finding.check for finding in login}


LOGIN = LoginNode(runs_dir="/home/me/runs", runs_type="nfs4")


@pytest.mark.parametrize(
    ("check", "changes", "severity"),
    [
        ("runs directory", {}, "ok"),
        ("runs directory", {"runs_type": "ext4"}, "note"),
        ("runs directory", {"runs_type": "ext4", "nodes_see_runs": True}, "ok"),
        ("runs directory", {"runs_type": "tmpfs"}, "cost"),
    ],
)
def test_finding_about_the_login_node(check: str, changes: dict[str, Any], severity: str) -> None:
    assert one(judge(OF_LOGIN, replace(LOGIN, **changes), "login"), check).severity == severity


NODE = NodeInfo(
    name="gpu01", driver=None, stage_dir="/tmp",
    stage_type="xfs", stage_free_bytes=10**12, shm_free_bytes=10**11,
    num_gpus=2, sees_runs=True, world_size=2, device="H200", teraflops=(700.0, 690.0),
    all_reduce_gb_per_second=9.1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("check", "changes", "severity", "word"),
    [
        ("stage directory", {}, "ok", "1,000 GB"),
        ("stage directory", {"stage_type": "tmpfs"}, "note", "memory"),
        ("stage directory", {"stage_free_bytes": 10**9}, "note", "shared storage"),
        ("stage directory", {"stage_free_bytes": None}, "cost", "--stage-dir"),
        ("/dev/shm", {"shm_free_bytes": 64 * 2**20}, "cost", "bus error"),
        ("locked memory", {}, "ok", "no InfiniBand"),
        ("locked memory", {"locked_bytes": 8 * 2**20}, "cost", "ulimit -l unlimited"),
        ("runs directory", {"sees_runs": False}, "cost", "--runs-dir"),
        ("Slurm's commands", {"slurm_error": "sbatch: not on the PATH"}, "cost", "sbatch: not"),
        ("preflight", {"problem": "gpu01 computes wrongly"}, "cost", "computes wrongly"),
        ("preflight", {}, "ok", "2 ranks on H200, all-reduce 9.1 GB/s"),
        ("preflight", {"device": "CPU"}, "cost", "GB/s; there is no NVIDIA driver"),
    ],
)  # fmt: skip
def test_finding_about_a_node(check: str, changes: dict[str, Any], severity: str, word: str) -> None:
    finding = one(merge(judge(OF_NODE, replace(NODE, **changes), "gpu01")), check)
    assert finding.severity == severity
    assert word in f"{finding.value} {finding.cost} {finding.what_to_do}"


def test_same_finding_of_several_nodes_is_one() -> None:
    assert {finding.severity for finding in judge(OF_NODE, NODE, "gpu01")} == {Severity.OK}
    slow = replace(NODE, stage_type="tmpfs")
    fuller = replace(slow, stage_free_bytes=9 * 10**11)
    found = merge([*judge(OF_NODE, slow, "gpu01"), *judge(OF_NODE, fuller, "gpu02"), *judge(OF_NODE, NODE, "gpu03")])
    two, other = (finding for finding in found if finding.check == "stage directory")
    assert (two.where, two.value) == ("gpu01 gpu02", "/tmp has at least 900 GB free on tmpfs, which is memory")
    assert (other.where, other.value) == ("gpu03", "/tmp has 1,000 GB free on xfs")
    assert two.number == 900
    assert one(found, "preflight").where == "gpu01 gpu02 gpu03"


NODES = [
    replace(NODE, name=name, network_gb_per_second=20.0, stage_gb_per_second=2.0, runs_gb_per_second=1.0)
    for name in ("gpu01", "gpu02", "gpu03", "gpu04")
]


@pytest.mark.parametrize(
    ("changes", "slow"),
    [
        ([{}, {}], []),
        ([{}, {"teraflops": (700.0, 600.0)}], [("computing", "gpu02 GPU 1", "600 TFLOP/s on H200, the median is 700")]),
        ([{}, {"device": "CPU", "teraflops": (0.6,)}, {"device": "CPU", "teraflops": (1.0,)}], []),
        ([{}, {"network_gb_per_second": 9.0}], [("network", "gpu02", "9 GB/s, the median is 20")]),
        # The better half is the measure when half is slow.
        (
            [{"stage_gb_per_second": 0.3}, {}, {}, {"stage_gb_per_second": 0.4}],
            [("writes to the stage directory", "gpu01 gpu04", "at least 0.3 GB/s, the median is 2")],
        ),
        ([{"runs_gb_per_second": None}, {"runs_gb_per_second": 0.1}], []),
    ],
)
def test_node_that_is_slow_compared_with_the_median_is_named(
    changes: list[dict[str, Any]], slow: list[tuple[str, str, str]]
) -> None:
    found = merge(compare([replace(node, **changed) for node, changed in zip(NODES, changes, strict=False)]))
    costly = [(one.check, one.where, one.value) for one in found if one.severity is Severity.COST]
    assert costly == slow
