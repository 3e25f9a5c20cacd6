"""Judges compute nodes for `hpc doctor`, each one by a table of checks, and their speeds by the median. Pure.

Runs on the login node.
"""

import resource
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median_high

from hpc.base.files import DEV_SHM
from hpc.base.kernel import NETWORK_BACKED, RAM_BACKED
from hpc.base.node_info import NodeInfo
from hpc.cluster.doctor.findings import Check, Finding, costs, note, ok, text_of

_MIN_STAGE_BYTES = 10 * 10**9
_MIN_MEMORY_BYTES = 10**9
_MIN_LOCKED_BYTES = 10**9
# A speed below this part of the median is slow. GPUs of one kind differ by a few percent. CPUs, disks and networks
# differ more.
_SLOW_GPU, _SLOW = 0.9, 0.5


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


def _sees_runs(node: NodeInfo) -> Finding:
    if node.sees_runs:
        return ok("the runs directory is the login node's")
    value = "the login node's runs directory does not exist here"
    return costs(value, "no run can start", "use --runs-dir on storage that all nodes share")


def _slurm_commands(node: NodeInfo) -> Finding:
    if not node.slurm_error:
        return ok("squeue, scontrol, sbatch and scancel work")
    return costs(
        node.slurm_error,
        "the node agents can neither requeue a run at its time limit nor resubmit it when nodes are lost",
        "ask the administrators for Slurm's commands on the compute nodes",
    )


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


OF_MACHINE: Mapping[str, Check[NodeInfo]] = {
    "stage directory": _stage,
    str(DEV_SHM): _memory,
    "locked memory": _locked_memory,
}
OF_NODE: Mapping[str, Check[NodeInfo]] = {
    **OF_MACHINE,
    "runs directory": _sees_runs,
    "Slurm's commands": _slurm_commands,
    "preflight": _preflight,
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
