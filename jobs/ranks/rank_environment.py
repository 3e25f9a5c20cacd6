"""The environment of a node's torchrun and of its ranks: every variable that we set is set here. Runs on compute nodes.

A rank's process wrapper adds the variables that differ from rank to rank (jobs.ranks.process_wrapper).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrelay import this_rank

from hpc.base.environment import (
    ATTEMPT,
    DATA,
    DEVICE,
    NEXT_CLAIM,
    PRELOAD,
    PROTOCOL,
    PYTHONPATH,
    RUN_DIR,
    SECRET,
    SNAPSHOTS,
    STOP_SIGNAL,
)
from hpc.base.errors import TorchrelayError
from hpc.run.events import ledger
from hpc.run.nodedir import NodeDir
from hpc.run.own_packages import users_pythonpath
from hpc.services.tracking.tracker import rank_variables
from jobs.control.channel import interface_of
from jobs.control.messages import Directive
from jobs.node_attempt import NodeAllocation, NodeAttempt
from jobs.ranks.slurm_variables import node_lists
from jobs.ranks.torchrun import Rendezvous, Standby

# Variables that name directories of the host, which a container does not have.
_OF_AN_ENVIRONMENT = frozenset({"VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME"})
# Variables of the ranks by --device. An empty CUDA_VISIBLE_DEVICES hides all GPUs from torch.
_OF_DEVICE = {"auto": {}, "cuda": {DEVICE: "cuda"}, "cpu": {DEVICE: "cpu", "CUDA_VISIBLE_DEVICES": ""}}


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Settings with which the ranks of this node start."""

    data: Path | None
    """Path of the data on this node; None if the run reads no data."""
    python: str
    """Path of the interpreter of torchrun and its ranks: this process's own, a staged copy's, or the user's, which may
    be in a container."""
    standby: Standby
    """The torchrun that waits for this node's next round."""


def round_environment(
    node: NodeAttempt, directive: Directive, setup: RankSetup, node_dir: NodeDir, address: str,
    import_path: Sequence[str],
) -> dict[str, str]:  # fmt: skip
    """Return the environment of this node's ranks in a round, without torchrun's own variables.

    The ranks find this node at `address`, and modules on the `import_path`.
    """
    spec, run, allocation = node.spec, node.run, node.allocation
    if spec.container:
        base = {name: value for name, value in os.environ.items() if name not in _OF_AN_ENVIRONMENT}
    else:
        base = environment_of(setup.python)
    threads = threads_per_rank(allocation, spec.resources.ranks_per_node)
    environment = rank_environment(
        base, allocation, spec.resources.gpus_per_node.count, address, threads, spec.network.interface
    )
    environment |= _OF_DEVICE[spec.device]
    environment |= {
        RUN_DIR: str(run.path),
        ATTEMPT: str(node.attempt.attempt),
        PROTOCOL: this_rank.PROTOCOL,
        NEXT_CLAIM: str(ledger.claim_file(run, node.attempt.attempt + 1)),
        SNAPSHOTS: str(node_dir.snapshots),
        **({DATA: str(setup.data)} if setup.data else {}),
        **({STOP_SIGNAL: spec.stop_signal} if spec.stop_signal else {}),
    }
    if node.on_slurm:
        environment |= node_lists(allocation.hostnames, directive.members)
    # Use the user's own PYTHONPATH, with the additions of --setup and without our packages.
    own_path = environment.pop(PYTHONPATH, environment.get("PYTHONPATH", ""))
    path = [] if spec.container else users_pythonpath(own_path, run.packages)
    if import_path:
        environment["PYTHONPATH"] = ":".join([*import_path, *path])
    return {**rank_variables(run, spec), **environment}


def rank_environment(
    base: Mapping[str, str], allocation: NodeAllocation, num_gpus: int, address: str, threads: int,
    interface: str | None = None,
) -> dict[str, str]:  # fmt: skip
    """Return the environment of this node's ranks, without torchrun's own variables."""
    # A hung rank gets SIGABRT: Python then prints its stacks.
    changes = {"PYTHONFAULTHANDLER": "1"}
    chosen = {
        "OMP_NUM_THREADS": str(threads),
        # Idle threads of OpenMP spin for milliseconds and slow all processes on their cores: two runs at once become
        # six times slower. On its own cores a small model gains 17 % from spinning (docs/explanation/performance.md).
        "OMP_WAIT_POLICY": None if allocation.has_own_cores else "passive",
        # By default gloo publishes the address of this node's name, which is 127.0.1.1 on many systems.
        "GLOO_SOCKET_IFNAME": interface or interface_of(address),
    }
    if interface:
        chosen["NCCL_SOCKET_IFNAME"] = f"={interface}"
    changes |= {name: value for name, value in chosen.items() if value and name not in base}
    visible = base.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if allocation.cluster == "local" and len(visible) == num_gpus * allocation.num_nodes:
        first = allocation.node_rank * num_gpus
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + num_gpus])
    # Hide all GPUs from a run without GPUs: on some clusters it could use the GPUs of other jobs. If Slurm has still
    # given it one, such as a part of a GPU (--sbatch gres=shard:1), `base` names that GPU and overrides this.
    hidden = {} if num_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return {**hidden, **base, **changes}


def threads_per_rank(allocation: NodeAllocation, num_ranks: int) -> int:
    """Share the usable CPUs among the machine's ranks, `num_ranks` per node. Returns the threads per rank, at least 1.

    Raises:
        TorchrelayError: this process may use fewer cores than the job was given.
    """
    usable, machine = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if allocation.cpus is not None and usable < min(allocation.cpus, machine):
        raise TorchrelayError(
            f"{allocation.host} lets the job use {usable} of the {allocation.cpus} CPUs it asked for: the job "
            "inherited the CPU binding of another job's shell; type `unset SLURM_CPU_BIND` before sbatch, or submit "
            "with hpc submit"
        )
    # Without binding, a process may use the cores of other jobs as well.
    usable = min(usable, allocation.cpus or usable)
    sharing = num_ranks * (allocation.num_nodes if allocation.cluster == "local" else 1)
    return max(1, usable // sharing)


def environment_of(python: str) -> dict[str, str]:
    """Return this process's variables for the interpreter `python`, with its venv or conda environment active.

    An interpreter of the system or of an environment module is in none.
    """
    prefix = Path(python).parent.parent
    is_in_one = Path(prefix, "pyvenv.cfg").is_file() or Path(prefix, "conda-meta").is_dir()
    return activated_environment(os.environ, python) if is_in_one else dict(os.environ)


def activated_environment(base: Mapping[str, str], python: str, prefix: str = sys.prefix) -> dict[str, str]:
    """Return `base` with the Python environment of the interpreter `python` active instead of the one at `prefix`.

    Entries of PATH and LD_LIBRARY_PATH below `prefix` become the same paths in the new environment.
    """
    copy = str(Path(python).parent.parent)
    if copy == prefix:
        return dict(base)
    changes = {name: _replace_prefix(base[name], prefix, copy) for name in ("PATH", "LD_LIBRARY_PATH") if name in base}
    others = (entry for entry in changes.get("PATH", "").split(":") if entry not in {f"{copy}/bin", ""})
    changes["PATH"] = ":".join([f"{copy}/bin", *others])
    is_conda = base.get("CONDA_PREFIX") == prefix or Path(copy, "conda-meta").is_dir()
    others_active = {name for name in ("CONDA_PREFIX", "VIRTUAL_ENV") if base.get(name) == prefix}
    kept = {name: value for name, value in base.items() if name not in {"PYTHONHOME", *others_active}}
    return {**kept, **changes, "CONDA_PREFIX" if is_conda else "VIRTUAL_ENV": copy}


def _replace_prefix(path: str, old: str, new: str) -> str:
    entries = path.split(":")
    return ":".join(new + entry.removeprefix(old) if f"{entry}/".startswith(f"{old}/") else entry for entry in entries)


def torchrun_environment(
    rendezvous: Rendezvous, ranks: Mapping[str, str], preload: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment of this node's torchrun. Its ranks get all of it except the secret. Pure.

    `preload` are the modules that torchrun imports before it forks the ranks.
    """
    return {
        **ranks,
        **({PRELOAD: ",".join(preload)} if preload else {}),
        # Only this user may read the environment of a process, unlike its arguments.
        SECRET: rendezvous.secret,
        # All nodes have the same number of ranks: torchrun need not ask the others for theirs.
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    }
