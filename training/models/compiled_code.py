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

from training.runtime.compat import default_compiler_directory
from training.runtime.process_group import ProcessGroup
from training.runtime.rank_device import device_name, processor_name
from training.runtime.run_context import RunContext

_DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"


def choose_directory(context: RunContext) -> None:
    """Let torch compile into the run's directory on this node, unless the user has chosen another one.

    /dev/shm may be mounted noexec: torch could not load what it has compiled there.
    """
    if context.node_dir is None or os.environ.get(_DIRECTORY) not in {None, default_compiler_directory()}:
        return
    with suppress(OSError):
        if not os.statvfs(context.node_dir.path).f_flag & os.ST_NOEXEC:
            os.environ[_DIRECTORY] = str(context.node_dir.compiled)


@contextmanager
def kept_code(context: RunContext, group: ProcessGroup) -> Iterator[None]:
    """Use and keep the run's compiled code while torch compiles. All ranks must enter this.

    It copies nothing if torch compiles into another directory than the run's.
    """
    kept = context.run_dir.compiled / _conditions(context, group)
    here = Path(os.environ.get(_DIRECTORY, ""))
    is_own = context.node_dir is not None and here == context.node_dir.compiled
    if is_own and group.rank_info.local_rank == 0 and kept.is_dir():
        _copy_back(kept, here)
    group.all_gather_json(None)  # the other ranks of this node wait for the copy
    yield
    group.all_gather_json(None)  # they may still compile
    if is_own and group.is_rank_zero and here.is_dir() and not kept.exists():
        _keep(here, kept)


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
    hidden = kept.with_name(f".{kept.name}")
    shutil.rmtree(hidden, ignore_errors=True)  # what a killed rank has left
    with suppress(OSError, shutil.Error):
        kept.parent.mkdir(exist_ok=True)
        shutil.copytree(here, hidden)
        hidden.rename(kept)
