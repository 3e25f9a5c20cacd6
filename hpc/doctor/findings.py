"""The findings of `hpc doctor` about runs, the login node and compute nodes: one small function per check. Pure."""

import re
import resource
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

from hpc.core.kernel import NETWORK_BACKED, RAM_BACKED
from hpc.core.node_info import NodeInfo, TorchBuild
from hpc.core.nodedir import DEV_SHM
from hpc.slurm.client import Fields
from hpc.status.warnings import ASK_NO_GPUS
from hpc.submit.runs_storage import LOST, Feature

_MIN_STAGE_BYTES = 10 * 10**9
_MIN_MEMORY_BYTES = 10**9
_MIN_OPEN_FILES = 1024
_MIN_LOCKED_BYTES = 10**9
_LOCAL_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"})
# Prefixes of virtual interfaces, which lead to no other node. NCCL itself skips the first two if there is another.
_VIRTUAL = ("lo", "docker", "virbr", "veth", "br-", "cni", "podman", "flannel", "cali")

Facts = TypeVar("Facts")


class Severity(StrEnum):
    """How much a finding matters."""

    COST = "cost"
    """Runs will lose work or time, or fail."""
    NOTE = "note"
    """Runs may lose work or time in some cases."""
    UNKNOWN = "unknown"
    OK = "ok"


@dataclass(frozen=True)
class Verdict:
    """The result of one check."""

    severity: Severity
    value: str
    """What was seen."""
    cost: str = ""
    what_to_do: str = ""

    def at(self, check: str, where: str) -> "Finding":
        """The finding of this check in this place."""
        return Finding(check=check, where=where, **vars(self))


@dataclass(frozen=True, kw_only=True)
class Finding(Verdict):
    """The result of one check in one place."""

    check: str
    where: str
    """`cluster`, `login`, a run, or the names of nodes."""


Check = Callable[[Facts], Verdict | None]


ok = partial(Verdict, Severity.OK)
note = partial(Verdict, Severity.NOTE)
costs = partial(Verdict, Severity.COST)
_UNKNOWN = Verdict(Severity.UNKNOWN, "not reported")


def judge(checks: Mapping[str, Check[Facts]], facts: Facts, where: str) -> list[Finding]:
    """Apply a table of checks; one that returns None lacks the facts."""
    return [(check(facts) or _UNKNOWN).at(name, where) for name, check in checks.items()]


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Join equal findings of several places."""
    places = dict[Finding, list[str]]()
    for finding in findings:
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    return [replace(finding, where=" ".join(where)) for finding, where in places.items()]


@dataclass(frozen=True, kw_only=True)
class RunMeasurements:
    """What a run has measured."""

    name: str
    save_seconds: float | None
    """The longest save."""
    is_script: bool
    in_place: str | None = None
    """Why the last attempt did not stage its data."""
    no_snapshots: str | None = None
    """Why the last attempt took no snapshots."""
    not_forked: str | None = None
    """Why the ranks of the last attempt were not forks of torchrun."""


@dataclass(frozen=True, kw_only=True)
class LoginNode:
    """The login node."""

    runs_dir: str
    runs_type: str | None
    """Type of its file system; None if unknown."""
    torch: TorchBuild | None
    open_files: int | None
    """How many a process of a job may have, if jobs inherit the limit of the login node."""
    runs_lack: tuple[Feature, ...] = ()
    """What its file system lacks, as far as it could be tried out."""
    automounted: str | None = None
    """The directory below which an automounter mounts it."""
    nodes_see_runs: bool = False
    """Whether compute nodes were inspected, and all see the runs directory."""


def _runs_dir(login: LoginNode) -> Verdict | None:
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
            "check with hpc doctor --node; or use --runs-dir with another path to it",
        )
    if login.nodes_see_runs or login.runs_type not in _LOCAL_DISK:
        return ok(value)
    return note(
        value,
        "this looks like a local disk; unless the nodes mount it, no run can start",
        "check with hpc doctor --node; use --runs-dir on storage that all nodes share",
    )


def _torch(login: LoginNode) -> Verdict:
    install = "pip install torch torchvision, from an index with builds for your GPUs"
    if login.torch is None:
        return costs("torch is not installed in this environment", "no run can train", install)
    if login.torch.accelerator is None:
        value = f"torch {login.torch.version} is built for CPUs only"
        return costs(value, "it cannot use the GPUs of a job, so that runs treat every GPU node as a bad node", install)
    return ok(f"torch {login.torch.version} for {login.torch.accelerator}")


def _open_files(facts: LoginNode | NodeInfo) -> Verdict | None:
    limit = facts.open_files
    if limit is None:
        return None
    if limit >= _MIN_OPEN_FILES:
        return ok(f"{limit} open files")
    return costs(
        f"a process may have {limit} open files",
        "loader workers and large jobs need more: ranks crash with `Too many open files`",
        "run ulimit -n 65536 before hpc submit, if jobs inherit the shell's limits; or ask for LimitNOFILE= of slurmd",
    )


def _locked_memory(node: NodeInfo) -> Verdict:
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


def inherits_open_files(config: Fields) -> bool:
    """Whether a job inherits the limit of open files from the shell that submits it."""
    only, but = (set(re.findall(r"\w+", config.get(f"PropagateResourceLimits{which}", ""))) for which in ("", "Except"))
    return bool({"ALL", "NOFILE"} & only) if but <= {"null"} else "NOFILE" not in but


OF_LOGIN: Mapping[str, Check[LoginNode]] = {"runs directory": _runs_dir, "torch": _torch, "open files": _open_files}


def _staging(run: RunMeasurements) -> Verdict:
    if run.in_place is None:
        return ok("the data were staged, or the run has none")
    return costs(
        run.in_place,
        "every epoch reads the data from shared storage",
        "submit with --stage-dir and a directory on a larger disk of the nodes",
    )


def _snapshots(run: RunMeasurements) -> Verdict:
    if run.no_snapshots is None:
        return ok("snapshots are taken")
    return costs(
        run.no_snapshots,
        "a crash or a lost node costs all steps since the last checkpoint, instead of about a second",
        "submit with more --mem, or ask for a larger /dev/shm; otherwise use a shorter --checkpoint-every",
    )


def _start(run: RunMeasurements) -> Verdict:
    if run.not_forked is None:
        return ok("ranks start as forks of torchrun")
    return costs(run.not_forked, "each rank imports torch itself whenever it starts, which takes seconds", ASK_NO_GPUS)


OF_RUN: Mapping[str, Check[RunMeasurements]] = {"staging": _staging, "snapshots": _snapshots, "start": _start}


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _stage(node: NodeInfo) -> Verdict:
    directory, free = node.stage_dir, node.stage_free_bytes
    if free is None:
        return costs(f"{directory} does not exist", "no run can stage its data or start", "use another --stage-dir")
    value = f"{directory} has {_gigabytes(free)} free on {node.stage_type or 'an unknown file system'}"
    if node.stage_type in RAM_BACKED:
        return note(
            f"{value}, which is memory",
            "the staged data count as memory of the job and may exceed its limit",
            "add the size of the data set to --mem, or use --stage-dir with a directory on the nodes' disks",
        )
    if node.stage_type in NETWORK_BACKED:
        return note(
            f"{value}, which is on other machines",
            "every node copies the data to it, but still reads the copy over the network",
            "use --stage-dir with a directory on the nodes' own disks; '$NAME' is a variable of the job on the node",
        )
    if free >= _MIN_STAGE_BYTES:
        return ok(value)
    return note(
        value,
        "larger data sets are not staged: every epoch reads them from shared storage",
        "use --stage-dir with a directory on a larger disk of the nodes",
    )


def _memory(node: NodeInfo) -> Verdict:
    free = node.shm_free_bytes
    value = f"{DEV_SHM} does not exist" if free is None else f"{DEV_SHM} has {_gigabytes(free)} free"
    if free is not None and free >= _MIN_MEMORY_BYTES:
        return ok(value)
    return costs(
        value,
        "loader workers crash with a bus error when it is full; without space for snapshots (three times a checkpoint) "
        "a crash costs all steps since the last checkpoint",
        f"ask the administrators for `mount -o remount,size=50% {DEV_SHM}` on the nodes (containers: --shm-size)",
    )


def _interfaces(node: NodeInfo) -> Verdict:
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
    # InfiniBand interfaces may have other addresses than those that the host names resolve to.
    if route is None or used[0] == route or used[0].startswith("ib"):
        return ok(value if route is None else f"{value}; {route} leads to the other nodes")
    return note(
        f"{value}; {route} leads to the other nodes, but NCCL tries {used[0]} first",
        f"if {used[0]} does not lead to the other nodes, ranks on GPUs hang",
        f"run export NCCL_SOCKET_IFNAME=={route} before hpc submit; jobs inherit it",
    )


def nccl_interfaces(interfaces: tuple[str, ...], setting: str) -> list[str]:
    """The interfaces that NCCL uses, in its order, of those with an address, in the kernel's order.

    `setting` is NCCL_SOCKET_IFNAME: prefixes after an optional `^`, which excludes, and `=`, for whole names. Source:
    NVIDIA's NCCL documentation, Environment Variables.
    """
    if not setting:
        infiniband = [i for i in interfaces if i.startswith("ib")]
        return infiniband or [i for i in interfaces if not i.startswith(_VIRTUAL[:2])]
    exclude, exact = setting.startswith("^"), setting.lstrip("^").startswith("=")
    names = setting.lstrip("^").lstrip("=").split(",")
    return [i for i in interfaces if any(i == n if exact else i.startswith(n) for n in names) != exclude]


def _sees_runs(node: NodeInfo) -> Verdict:
    if node.sees_runs:
        return ok("the runs directory is the login node's")
    value = "the login node's runs directory does not exist here"
    return costs(value, "no run can start", "use --runs-dir on storage that all nodes share")


def _commands(node: NodeInfo) -> Verdict:
    if not node.slurm_error:
        return ok("squeue, scontrol, sbatch and scancel work")
    return costs(
        node.slurm_error,
        "the node agents can neither requeue a run at its time limit nor resubmit it when nodes are lost",
        "ask the administrators for Slurm's commands on the compute nodes",
    )


def _preflight(node: NodeInfo) -> Verdict:
    if node.problem:
        return costs(node.problem, "no run can train on these nodes", "use --exclude, and tell the administrators")
    if node.num_gpus and " on CPU" in node.preflight:
        return costs(
            node.preflight,
            "torch found no GPU in a job with GPUs: ranks would train on the CPU",
            "check nvidia-smi on the node, and the CUDA version that torch was built for",
        )
    return ok(node.preflight)


OF_MACHINE: Mapping[str, Check[NodeInfo]] = {
    "stage directory": _stage,
    str(DEV_SHM): _memory,
    "open files": _open_files,
    "locked memory": _locked_memory,
}
OF_NODE: Mapping[str, Check[NodeInfo]] = {
    **OF_MACHINE,
    "runs directory": _sees_runs,
    "Slurm's commands": _commands,
    "network interface": _interfaces,
    "preflight": _preflight,
}
