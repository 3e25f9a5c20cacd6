"""Keeps the code that torch.compile makes, for later starts of the run. Runs on every rank.

The ranks of a node compile into a directory of this node. When they have compiled, rank 0 copies it to the run
directory. A later start, perhaps on another node, copies it back. Code of another processor, GPU or torch is not used:
torch does not check the processor, and code for other vector units can compute wrongly.
"""

import hashlib
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from hpc.base.files import make_below, new_directory, remove_abandoned
from training.runtime.compat import default_compiler_directory
from training.runtime.process_group import ProcessGroup
from training.runtime.rank_device import device_name, processor_name
from training.runtime.run_context import RunContext

_DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def kept_code(context: RunContext, group: ProcessGroup) -> Iterator[None]:
    """Use and keep the run's compiled code while torch compiles. All ranks must enter this.

    It changes nothing if the user has chosen torch's directory, or if torch could not compile into the run's.
    """
    here = _directory(context)
    kept = context.run_dir.compiled / _conditions(context, group)
    if here is not None:
        os.environ[_DIRECTORY] = str(here)
        if group.rank_info.local_rank == 0 and kept.is_dir():
            _copy_back(kept, here)
    group.all_gather_json(None)  # the other ranks of this node wait for the copy
    yield
    group.all_gather_json(None)  # they may still compile
    if here is not None and group.is_rank_zero and here.is_dir() and not kept.exists():
        _keep(here, kept)


def _directory(context: RunContext) -> Path | None:
    """Return the run's directory for compiled code on this node; None if torch must use another one."""
    if context.node_dir is None or os.environ.get(_DIRECTORY) not in {None, default_compiler_directory()}:
        return None
    try:
        # /dev/shm may be mounted noexec: torch could not load what it has compiled there.
        is_noexec = os.statvfs(context.node_dir.path).f_flag & os.ST_NOEXEC
    except OSError:
        return None
    return None if is_noexec else context.node_dir.compiled


def _conditions(context: RunContext, group: ProcessGroup) -> str:
    """Return a name for what decides about the code: the software, the hardware and the images per rank."""
    software = torch.__version__, platform.python_version(), processor_name(), device_name(group.device)
    images = context.config.batch_size, context.config.grad_accum_steps, group.world_size
    return hashlib.sha256(repr((software, images)).encode()).hexdigest()[:16]


def _copy_back(kept: Path, here: Path) -> None:
    """Copy the kept code to this node. On an error, such as a full disk, torch compiles again."""
    try:
        shutil.copytree(kept, here, dirs_exist_ok=True)
    except (OSError, shutil.Error):
        shutil.rmtree(here, ignore_errors=True)


def _keep(here: Path, kept: Path) -> None:
    """Copy this node's code to the run directory, as a whole. On an error there is no copy."""
    remove_abandoned(kept.parent, ".*.tmp")  # what a killed rank has left
    with suppress(OSError, shutil.Error):
        make_below(kept.parents[1], kept.parent)
        with new_directory(kept) as draft:
            shutil.copytree(here, draft, dirs_exist_ok=True)
