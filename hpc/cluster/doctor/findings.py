"""Judges runs, the login node and compute nodes for `hpc doctor`, by tables of checks. Pure; runs on the login node."""

import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from statistics import median_high
from typing import Any, TypeVar

from hpc.base.files import DEV_SHM
from hpc.base.kernel import NETWORK_BACKED, RAM_BACKED
from hpc.base.node_info import NodeInfo, TorchBuild
from hpc.status.warnings import ASK_NO_GPUS
from hpc.submissions.runs_storage import LOST, Feature

_MIN_STAGE_BYTES = 10 * 10**9
_MIN_MEMORY_BYTES = 10**9
_MIN_LOCKED_BYTES = 10**9
_LOCAL_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"})
# A speed below this part of the median is slow. GPUs of one kind differ by a few percent. CPUs, disks and networks
# differ more.
_SLOW_GPU, _SLOW = 0.9, 0.5
_MAX_CLOCK_SECONDS = 1.0
# Prefixes of virtual interfaces, which do not lead to other nodes. By default, NCCL skips `lo` and `docker` interfaces.
_VIRTUAL = ("lo", "docker", "virbr", "veth", "br-", "cni", "podman", "flannel", "cali")

Facts = TypeVar("Facts")


class Severity(StrEnum):
    """The severity of a finding: how much it costs runs."""

    COST = "cost"
    """Runs will lose work or time, or fail."""
    NOTE = "note"
    """Runs may lose work or time in some cases."""
    UNKNOWN = "unknown"
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """The result of one check in one place."""

    severity: Severity
    value: str
    """The setting or measurement that was seen."""
    cost: str = ""
    what_to_do: str = ""
    check: str = ""
    where: str = ""
    """`cluster`, `login`, a run, or the names of nodes."""
    number: float | None = None
    """The measured number in GB, GB/s, TFLOP/s or seconds; of several places, the lowest. None if there is none."""

    def at(self, check: str, where: str) -> "Finding":
        """Return a copy of the finding with the name of its check and its place."""
        return replace(self, check=check, where=where)


Check = Callable[[Facts], Finding | None]


ok = partial(Finding, Severity.OK)
note = partial(Finding, Severity.NOTE)
costs = partial(Finding, Severity.COST)
_UNKNOWN = Finding(Severity.UNKNOWN, "not reported")


def judge(checks: Mapping[str, Check[Facts]], facts: Facts, where: str) -> list[Finding]:
    """Return the finding of each check in a table. A check that returns None, for lack of facts, counts as UNKNOWN."""
    return [(check(facts) or _UNKNOWN).at(name, where) for name, check in checks.items()]


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that differ only in their places and numbers into one for all places. Write numbers into values."""
    alike = dict[Finding, list[Finding]]()
    for finding in findings:
        alike.setdefault(replace(finding, where="", number=None), []).append(finding)
    return [_joined(group) for group in alike.values()]


def _joined(group: Sequence[Finding]) -> Finding:
    numbers = [finding.number for finding in group if finding.number is not None]
    text = "at least " if len(set(map(text_of, numbers))) > 1 else ""
    least = min(numbers, default=None)
    return replace(
        group[0],
        where=" ".join(finding.where for finding in group),
        number=least,
        value=group[0].value if least is None else group[0].value.replace("{number}", text + text_of(least)),
    )


def text_of(number: float) -> str:
    """Return a measured number with three digits."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


@dataclass(frozen=True, kw_only=True)
class RunMeasurements:
    """Measurements of a run, from its events."""

    name: str
    save_seconds: float | None
    """Seconds that the longest save took. None before the first save."""
    is_script: bool
    in_place: str | None = None
    """Reason why the last attempt did not stage its data. None if it did, or has no data."""
    no_snapshots: str | None = None
    """Reason why the last attempt took no snapshots. None if it took them."""
    not_forked: str | None = None
    """Reason why the ranks of the last attempt did not start as forks of torchrun. None if they did."""


@dataclass(frozen=True, kw_only=True)
class LoginNode:
    """The login node, on which `hpc doctor` runs."""

    runs_dir: str
    runs_type: str | None
    """Type of the runs directory's file system. None if unknown."""
    torch: TorchBuild | None
    """Torch in the environment of the script that would be submitted now. None if it has none."""
    python: str = ""
    """Python of this environment."""
    runs_lack: tuple[Feature, ...] = ()
    """Features that the file system of the runs directory lacks. Also empty if the features cannot be tested."""
    automounted: str | None = None
    """Directory below which autofs mounts the runs directory on demand. None if autofs does not mount it."""
    nodes_see_runs: bool = False
    """Whether a run has started in the runs directory, or all inspected compute nodes see the directory."""
    bad_nodes: tuple[str, ...] = ()
    """The nodes that have recently failed the user's runs, with the reason."""


def _costs_if(field: str, cost: str, what_to_do: str, *, otherwise: str) -> Check[Any]:
    """Return a check of a field that names a problem. If the field is empty or None, the finding is OK."""

    def check(facts: Any) -> Finding:
        seen = getattr(facts, field)
        return costs(seen, cost, what_to_do) if seen else ok(otherwise)

    return check


def _runs_dir(login: LoginNode) -> Finding | None:
    if login.runs_type is None:
        return None
    value = f"{login.runs_dir} is on {login.runs_type}"
    if login.runs_type in RAM_BACKED:
        share = "use --runs-dir on storage that all nodes share"
        return costs(value, "compute nodes do not see it: no run can start", share)
    if login.runs_lack:
        verdict = costs if Feature.HARD_LINKS in login.runs_lack else note
        lost = "; ".join(LOST[feature] for feature in login.runs_lack)
        return verdict(
            f"{value}, which has no {' and no '.join(login.runs_lack)}", lost, "use --runs-dir on other storage"
        )
    if login.automounted is not None and not login.nodes_see_runs:
        return note(
            f"{value}, below {login.automounted}, where this machine mounts on demand (autofs)",
            "unless the nodes do the same, no run can start",
            "check with hpc doctor --nodes 1; or use --runs-dir with another path to it",
        )
    if login.nodes_see_runs or login.runs_type not in _LOCAL_DISK:
        return ok(value)
    return note(
        value,
        "this looks like a local disk; unless the nodes mount it, no run can start",
        "check with hpc doctor --nodes 1; use --runs-dir on storage that all nodes share",
    )


def _torch(login: LoginNode) -> Finding:
    if login.torch is None:
        return note(
            f"{login.python} has no torch",
            "hpc submit would refuse a script that you submit now",
            "activate the environment of your script, or use --python ENV/bin/python",
        )
    if login.torch.accelerator is None:
        value = f"torch {login.torch.version} is built for CPUs only"
        cost = "it cannot use the GPUs of a job, so that runs treat every GPU node as a bad node"
        return costs(value, cost, f"{login.python} -m pip install torch, from an index with builds for your GPUs")
    return ok(f"torch {login.torch.version} for {login.torch.accelerator}")


def _bad_nodes(login: LoginNode) -> Finding:
    if not login.bad_nodes:
        return ok("no node has failed your runs recently")
    return note(
        f"failed recently: {', '.join(login.bad_nodes)}",
        "new jobs avoid these nodes if enough others are left",
        f"tell the administrators; to use a node again, remove .bad-node.*.NODE.* in {login.runs_dir}",
    )


def _locked_memory(node: NodeInfo) -> Finding:
    limit = node.locked_bytes
    if limit is None:
        return ok("there is no InfiniBand")
    if limit == resource.RLIM_INFINITY or limit >= _MIN_LOCKED_BYTES:
        return ok("InfiniBand can use the memory of ranks")
    return costs(
        f"a process may lock {limit // 1024} KiB of memory",
        "InfiniBand cannot use the memory of ranks, which crash with `Cannot allocate memory`",
        "type ulimit -l unlimited before hpc submit if jobs inherit its limits; or have LimitMEMLOCK= of slurmd raised",
    )


OF_LOGIN: Mapping[str, Check[LoginNode]] = {"runs directory": _runs_dir, "torch": _torch, "nodes": _bad_nodes}
OF_RUN: Mapping[str, Check[RunMeasurements]] = {
    "staging": _costs_if(
        "in_place",
        "every epoch reads the data from shared storage",
        "submit with --stage-dir and a directory on a larger disk of the nodes",
        otherwise="the data were staged, or the run has none",
    ),
    "snapshots": _costs_if(
        "no_snapshots",
        "a crash or a lost node costs all steps since the last checkpoint, instead of about a second",
        "submit with more --mem, or ask for a larger /dev/shm; otherwise use a shorter --checkpoint-every",
        otherwise="snapshots are taken",
    ),
    "start": _costs_if(
        "not_forked",
        "each rank imports torch itself whenever it starts, which takes seconds",
        ASK_NO_GPUS,
        otherwise="ranks start as forks of torchrun",
    ),
}


def _stage(node: NodeInfo) -> Finding:
    directory, free = node.stage_dir, node.stage_free_bytes
    if free is None:
        return costs(f"{directory} does not exist", "no run can stage its data or start", "use another --stage-dir")
    value = f"{directory} has {{number}} GB free on {node.stage_type or 'an unknown file system'}"
    if node.stage_type in RAM_BACKED:
        found = note(
            f"{value}, which is memory",
            "the staged data count as memory of the job and may exceed its limit",
            "add the size of the data set to --mem, or use --stage-dir with a directory on the nodes' disks",
        )
    elif node.stage_type in NETWORK_BACKED:
        found = note(
            f"{value}, which is on other machines",
            "every node copies the data to it, but still reads the copy over the network",
            "use --stage-dir with a directory on the nodes' own disks; '$NAME' is a variable of the job on the node",
        )
    elif free >= _MIN_STAGE_BYTES:
        found = ok(value)
    else:
        found = note(
            value,
            "larger data sets are not staged: every epoch reads them from shared storage",
            "use --stage-dir with a directory on a larger disk of the nodes",
        )
    return replace(found, number=free / 1e9)


def _memory(node: NodeInfo) -> Finding:
    free = node.shm_free_bytes
    value = f"{DEV_SHM} does not exist" if free is None else f"{DEV_SHM} has {{number}} GB free"
    number = None if free is None else free / 1e9
    if free is not None and free >= _MIN_MEMORY_BYTES:
        return ok(value, number=number)
    return costs(
        value,
        "loader workers crash with a bus error when it is full; without space for snapshots (three times a checkpoint) "
        "a crash costs all steps since the last checkpoint",
        f"ask the administrators for `mount -o remount,size=50% {DEV_SHM}` on the nodes (containers: --shm-size)",
        number=number,
    )


def _interfaces(node: NodeInfo) -> Finding:
    physical = [name for name in node.interfaces if not name.startswith(_VIRTUAL)]
    value = " ".join(node.interfaces) or "none"
    route, setting = node.interface, node.nccl_interfaces
    if not physical:
        return costs(value, "no interface leads to other nodes: only runs on one node work", "ask the administrators")
    used = nccl_interfaces(node.interfaces, setting)
    if not used:
        return costs(
            f"NCCL_SOCKET_IFNAME={setting} matches none of the interfaces {value}",
            "NCCL finds no interface: no run on GPUs of several nodes starts",
            "unset NCCL_SOCKET_IFNAME before hpc submit",
        )
    # An InfiniBand interface is accepted, even if the host names resolve to addresses of another interface.
    if route is None or used[0] == route or used[0].startswith("ib"):
        return ok(value if route is None else f"{value}; {route} leads to the other nodes")
    return note(
        f"{value}; {route} leads to the other nodes, but NCCL tries {used[0]} first",
        f"if {used[0]} does not lead to the other nodes, ranks on GPUs hang",
        f"run export NCCL_SOCKET_IFNAME=={route} before hpc submit; jobs inherit it",
    )


def nccl_interfaces(interfaces: tuple[str, ...], setting: str) -> list[str]:
    """Return the interfaces that NCCL uses, in the order in which NCCL tries them.

    `interfaces` are the interfaces with an address, in the kernel's order. `setting` is NCCL_SOCKET_IFNAME: name
    prefixes, separated by commas. A leading `^` excludes the matching interfaces. `=` or `^=` means whole names.
    Source: NVIDIA's NCCL documentation, Environment Variables.
    """
    if not setting:
        infiniband = [i for i in interfaces if i.startswith("ib")]
        return infiniband or [i for i in interfaces if not i.startswith(_VIRTUAL[:2])]
    exclude, exact = setting.startswith("^"), setting.lstrip("^").startswith("=")
    names = setting.lstrip("^").lstrip("=").split(",")
    return [i for i in interfaces if any(i == n if exact else i.startswith(n) for n in names) != exclude]


def _sees_runs(node: NodeInfo) -> Finding:
    if node.sees_runs:
        return ok("the runs directory is the login node's")
    value = "the login node's runs directory does not exist here"
    return costs(value, "no run can start", "use --runs-dir on storage that all nodes share")


def _preflight(node: NodeInfo) -> Finding | None:
    if node.problem:
        return costs(node.problem, "no run can train on these nodes", "use --exclude, and tell the administrators")
    if not node.world_size:
        return None
    value = f"{node.world_size} rank{'s' * (node.world_size > 1)} on {node.device}"
    if node.all_reduce_gb_per_second is not None:
        value += ", all-reduce {number} GB/s"
    if node.num_gpus and node.device == "CPU":
        return costs(
            f"{value}; {f'the driver is {node.driver}' if node.driver else 'there is no NVIDIA driver'}",
            "torch found no GPU in a job with GPUs: ranks would train on the CPU",
            "check nvidia-smi on the node, and the CUDA version that torch was built for",
            number=node.all_reduce_gb_per_second,
        )
    return ok(value, number=node.all_reduce_gb_per_second)


def _clock(node: NodeInfo) -> Finding | None:
    if node.clock_seconds is None:
        return None
    value, number = "differs from the first node's by {number} s", abs(node.clock_seconds)
    if number <= _MAX_CLOCK_SECONDS:
        return ok(value, number=number)
    return note(
        value,
        "the times in the logs of different nodes cannot be compared",
        "ask the administrators to synchronize the clocks",
        number=number,
    )


OF_MACHINE: Mapping[str, Check[NodeInfo]] = {
    "stage directory": _stage,
    str(DEV_SHM): _memory,
    "locked memory": _locked_memory,
}
OF_NODE: Mapping[str, Check[NodeInfo]] = {
    **OF_MACHINE,
    "runs directory": _sees_runs,
    "Slurm's commands": _costs_if(
        "slurm_error",
        "the node agents can neither requeue a run at its time limit nor resubmit it when nodes are lost",
        "ask the administrators for Slurm's commands on the compute nodes",
        otherwise="squeue, scontrol, sbatch and scancel work",
    ),
    "network interface": _interfaces,
    "preflight": _preflight,
    "clock": _clock,
}

SPEEDS = {
    "network": "network_gb_per_second",
    "writes to the stage directory": "stage_gb_per_second",
    "writes to the runs directory": "runs_gb_per_second",
}
"""Speeds that each node measures, in GB/s: the name of the check, and the field of `NodeInfo`."""


def compare(nodes: Sequence[NodeInfo]) -> list[Finding]:
    """Judge the speeds of nodes by their median, and those of devices by the median of all devices of the same kind."""
    found = list[Finding]()
    for check, field in SPEEDS.items():
        speeds = {node.name: speed for node in nodes if (speed := getattr(node, field)) is not None}
        found += _compared(check, speeds, "GB/s", _SLOW)
    for device in dict.fromkeys(node.device for node in nodes if node.teraflops):
        name, slow = ("rank", _SLOW) if device == "CPU" else ("GPU", _SLOW_GPU)
        alike = (node for node in nodes if node.device == device)
        speeds = {f"{node.name} {name} {rank}": speed for node in alike for rank, speed in enumerate(node.teraflops)}
        found += _compared("computing", speeds, f"TFLOP/s on {device}", slow)
    return found


def _compared(check: str, speeds: Mapping[str, float], unit: str, slow: float) -> list[Finding]:
    """Return a finding for each place. The median is the higher one of two middle speeds: half of them may be slow."""
    found = list[Finding]()
    for where, speed in speeds.items():
        usual = median_high(speeds.values())
        verdict = ok(f"{{number}} {unit}", number=speed)
        if speed < slow * usual:
            verdict = costs(
                f"{{number}} {unit}, the median is {text_of(usual)}",
                "all ranks wait for the slowest one",
                "use --exclude, and tell the administrators",
                number=speed,
            )
        found.append(verdict.at(check, where))
    return found
