"""Decides whether the ranks of a run must have GPUs, so that none uses a CPU by mistake. Runs on the login node."""

from pathlib import Path

from hpc.base.errors import UserError
from hpc.base.node_info import TorchBuild
from hpc.run.device_choice import DeviceChoice
from hpc.run.spec import Cluster
from hpc.slurm import client as slurm

# One of these exists if a GPU's driver is loaded.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def resolve_device(asked: DeviceChoice, gpus_per_node: int, cluster: Cluster, build: TorchBuild | None) -> DeviceChoice:
    """Return the --device of a run: `auto` becomes `cuda` if GPUs were requested and can exist.

    GPUs cannot exist on a testbed, nor, with --cluster local, on a machine without a driver.

    Args:
        asked: the value of --device.
        gpus_per_node: the number of GPUs per node; 0 if the run uses none.
        cluster: where the run trains.
        build: the build of torch that the ranks import; None if unknown.

    Raises:
        UserError: the ranks would not get GPUs, or their torch cannot use them.
    """
    if gpus_per_node == 0:
        if asked == "cuda":
            raise UserError("--device is cuda, but --gpus-per-node 0 asks for no GPUs: leave one of them out")
        return asked  # with auto, ranks use a part of a GPU if --sbatch gres=shard:1 gives them one
    simulated = slurm.is_testbed() if cluster == "slurm" else not any(driver.exists() for driver in _DRIVERS)
    if asked == "cpu" or (asked == "auto" and simulated):
        return asked
    if build is not None and build.accelerator is None:
        raise UserError(
            f"--gpus-per-node is {gpus_per_node}, but this environment's torch {build.version} is built for CPUs "
            "alone: install one for GPUs, or use --device cpu"
        )
    return "cuda"
