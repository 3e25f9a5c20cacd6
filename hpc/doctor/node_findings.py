"""What a machine, or what a run has met with, says of runs to come: one small function a symptom. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc.core.node_info import NodeInfo, TorchBuild
from hpc.core.nodedir import DEV_SHM
from hpc.doctor.findings import Check, Verdict, costs, note, ok
from hpc.slurm.cluster import Fields

LEAST_STAGE_BYTES = 10 * 10**9
_LEAST_MEMORY_BYTES = 10**9
_LEAST_OPEN_FILES = 1024
_OWN_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"})
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
# What NCCL does not take if there is another, and what leads nowhere.
_INNER = ("lo", "docker", "virbr", "veth", "br-", "cni", "podman", "flannel", "cali")


@dataclass(frozen=True, kw_only=True)
class RunMeasurements:
    """What a run has met with so far."""

    name: str
    save_seconds: float | None
    """The longest that a save took."""
    is_script: bool
    in_place: str | None = None
    """Why the data of the last attempt were not staged."""
    no_snapshots: str | None = None
    """Why the last attempt took no snapshots."""


@dataclass(frozen=True, kw_only=True)
class LoginNode:
    """The login node."""

    runs_dir: str
    runs_type: str | None
    """Type of its file system; None if unknown."""
    torch: TorchBuild | None
    open_files: int | None
    """How many a process of a job may have, if Slurm hands the limit of the login node on."""
    nodes_see_runs: bool = False
    """Whether nodes were asked, and all see the runs directory."""


def small_stage(value: str) -> Verdict:
    """There is little room for staging."""
    return note(
        value,
        "data that do not fit are read from shared storage instead, in every epoch",
        "--stage-dir with a directory on a larger disk of the nodes",
    )


def _runs_dir(login: LoginNode) -> Verdict | None:
    if login.runs_type is None:
        return None
    value = f"{login.runs_dir} is on {login.runs_type}"
    if login.runs_type in _IN_MEMORY:
        return costs(value, "no node sees the runs: none can start", "--runs-dir on storage that all nodes share")
    if login.nodes_see_runs or login.runs_type not in _OWN_DISK:
        return ok(value)
    return note(
        value,
        "it looks like this machine's own disk; unless the nodes mount it from here, no run can start",
        "hpc doctor --node finds out; --runs-dir on storage that all nodes share",
    )


def _torch(login: LoginNode) -> Verdict:
    install = "pip install torch torchvision, from an index that has builds for your GPUs"
    if login.torch is None:
        return costs("no torch in this environment", "nothing can train", install)
    if login.torch.accelerator is None:
        value = f"torch {login.torch.version}, built for CPUs alone"
        return costs(value, "GPUs are asked for and cannot be used: a node that has them is taken for unfit", install)
    return ok(f"torch {login.torch.version} for {login.torch.accelerator}")


def _open_files(login: LoginNode) -> Verdict | None:
    return None if login.open_files is None else _limit_of_files(login.open_files)


def _limit_of_files(limit: int) -> Verdict:
    if limit >= _LEAST_OPEN_FILES:
        return ok(f"{limit} open files")
    return costs(
        f"a process may have {limit} files open",
        "loader workers and large jobs need more: ranks crash with `Too many open files`",
        "ulimit -n 65536 before hpc submit, if Slurm hands the shell's limits on; or ask for LimitNOFILE= of slurmd",
    )


def is_handed_on(config: Fields) -> bool:
    """Whether Slurm gives a job the limit of open files of the shell that submits it."""
    only, but = (set(re.findall(r"\w+", config.get(f"PropagateResourceLimits{which}", ""))) for which in ("", "Except"))
    return bool({"ALL", "NOFILE"} & only) if but <= {"null"} else "NOFILE" not in but


OF_LOGIN: Mapping[str, Check[LoginNode]] = {"runs directory": _runs_dir, "torch": _torch, "open files": _open_files}


def _staging(run: RunMeasurements) -> Verdict:
    if run.in_place is None:
        return ok("the data were staged, or there were none to stage")
    return costs(
        run.in_place,
        "every epoch reads the data from shared storage",
        "hpc submit --stage-dir with a directory on a larger disk of the nodes",
    )


def _snapshots(run: RunMeasurements) -> Verdict:
    if run.no_snapshots is None:
        return ok("snapshots are taken")
    return costs(
        run.no_snapshots,
        "a crash or a lost node costs all steps since the last checkpoint, not a second's",
        "hpc submit with more --mem, or a larger /dev/shm; else a shorter --checkpoint-every",
    )


OF_RUN: Mapping[str, Check[RunMeasurements]] = {"staging": _staging, "snapshots": _snapshots}


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _stage(machine: NodeInfo) -> Verdict:
    place, free = machine.stage_dir, machine.stage_free_bytes
    if free is None:
        return costs(f"there is no {place}", "no run can stage its data there: none starts", "another --stage-dir")
    value = f"{place} has {_gigabytes(free)} free on {machine.stage_type or 'an unknown file system'}"
    if machine.stage_type in _IN_MEMORY:
        return note(
            f"{value}, which is memory",
            "the copy of the data counts as the job's memory, and may have it killed",
            "--mem for the data as well, or --stage-dir with a directory on the nodes' disks",
        )
    return small_stage(value) if free < LEAST_STAGE_BYTES else ok(value)


def _memory(machine: NodeInfo) -> Verdict:
    free = machine.memory_free_bytes
    value = f"there is no {DEV_SHM}" if free is None else f"{DEV_SHM} has {_gigabytes(free)} free"
    if free is not None and free >= _LEAST_MEMORY_BYTES:
        return ok(value)
    return costs(
        value,
        "loader workers hand their images over in it, and die of a bus error when it is full; snapshots need three "
        "times the size of a checkpoint there, else a crash costs the steps since the last checkpoint",
        f"ask the administrators for `mount -o remount,size=50% {DEV_SHM}` there (of a container: --shm-size)",
    )


def _interfaces(machine: NodeInfo) -> Verdict:
    outer = [name for name in machine.interfaces if not name.startswith(_INNER)]
    job, value = machine.job, " ".join(machine.interfaces) or "none"
    route, asked = (job.interface, job.nccl_interfaces) if job else (None, "")
    if not outer:
        return costs(value, "no interface leads to other nodes: runs of one node alone", "ask the administrators")
    taken = nccl_takes(machine.interfaces, asked)
    if not taken:
        value, change = (
            f"NCCL_SOCKET_IFNAME={asked}, and there is {value}",
            "unset NCCL_SOCKET_IFNAME before hpc submit",
        )
        return costs(value, "NCCL finds no interface: no run on GPUs of several nodes starts", change)
    # InfiniBand may have addresses of its own beside those that the nodes' names mean.
    if route is None or taken[0] == route or taken[0].startswith("ib"):
        return ok(value)
    return note(
        f"{value}; the other nodes are behind {route}, and NCCL begins with {taken[0]}",
        "if that one does not lead to the other nodes, ranks on GPUs wait for each other until they are ended",
        f"export NCCL_SOCKET_IFNAME=={route} before hpc submit, which hands it on",
    )


def nccl_takes(interfaces: tuple[str, ...], asked: str) -> list[str]:
    """The interfaces that NCCL uses, in its order.

    Args:
        interfaces: those with an address, in the kernel's order.
        asked: NCCL_SOCKET_IFNAME: prefixes after an optional `^`, which excludes, and `=`, which wants the whole name.
            Source: NVIDIA's NCCL documentation, Environment Variables.
    """
    if not asked:
        kinds = ([i for i in interfaces if i.startswith("ib")], [i for i in interfaces if not i.startswith(_INNER[:2])])
        return kinds[0] or kinds[1]
    exclude, exact = asked.startswith("^"), asked.lstrip("^").startswith("=")
    names = asked.lstrip("^").lstrip("=").split(",")
    return [i for i in interfaces if any(i == n if exact else i.startswith(n) for n in names) != exclude]


def _sees_runs(machine: NodeInfo) -> Verdict | None:
    if machine.job is None:
        return None
    if machine.job.sees_runs:
        return ok("the runs directory is the login node's")
    return costs(
        "the runs directory of the login node is not there",
        "no run can start",
        "--runs-dir on storage that all nodes share",
    )


def _clients(machine: NodeInfo) -> Verdict | None:
    if machine.job is None:
        return None
    if not machine.job.slurm_error:
        return ok("squeue, scontrol, sbatch and scancel work")
    return costs(
        machine.job.slurm_error,
        "the agents can neither requeue a run at its time limit nor start it elsewhere when nodes are lost",
        "ask the administrators for Slurm's clients on the compute nodes",
    )


def _preflight(machine: NodeInfo) -> Verdict | None:
    if machine.job is None:
        return None
    said = machine.job.preflight
    if not machine.job.passed:
        return costs(said, "no run can train on these nodes", "hpc submit --exclude, and tell the administrators")
    if " on CPU" in said:
        return costs(
            said,
            "GPUs were asked for, and torch found none: ranks would train on the CPU",
            "look at nvidia-smi there, and at the version of CUDA that torch was built for",
        )
    return ok(said)


OF_MACHINE: Mapping[str, Check[NodeInfo]] = {
    "stage directory": _stage,
    str(DEV_SHM): _memory,
    "open files": lambda machine: _limit_of_files(machine.open_files),
}
OF_NODE: Mapping[str, Check[NodeInfo]] = {
    **OF_MACHINE,
    "runs directory": _sees_runs,
    "Slurm's clients": _clients,
    "network interface": _interfaces,
    "preflight": _preflight,
}
