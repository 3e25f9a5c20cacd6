"""Stages and relinks a copy of the Python environment, and tries to import torch there. Runs on compute nodes.

If torch cannot be imported, this node's ranks start from the shared environment, as they do without `--stage-env`.
"""

import contextlib
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from hpc.base.errors import BadNodeError, TorchrelayError
from hpc.run.events.kinds import EnvironmentStaged
from hpc.sources.python_environment import EnvironmentDescription
from hpc.sources.source_files import inside_name
from jobs.node_attempt import log
from jobs.ranks.rank_environment import activated_environment
from jobs.staging.copy_progress import CancellableWait, Watch, stop_if
from jobs.staging.node_staging import NodeStaging

_TRY_SECONDS = 300.0


def stage_environment(staging: NodeStaging, archive: Path) -> str:
    """Stage the Python environment in an archive on this node's disk. Returns the ranks' interpreter.

    Raises StagingStopped and BadNodeError as `NodeStaging.stage_data` does.
    """
    node, python, fallback, began = staging.node, sys.executable, None, time.monotonic()
    try:
        python = _copy(staging, archive)
    except BadNodeError:
        raise  # the archive lies beside the run directory, which this node cannot read either
    except (TorchrelayError, OSError) as error:
        fallback = str(error)
        log(f"the ranks of {node.host} start from the shared environment, {sys.prefix}: {fallback}")
    seconds = round(time.monotonic() - began, 3)
    node.record(EnvironmentStaged(node=node.host, python=python, seconds=seconds, fallback=fallback))
    return python


def _copy(staging: NodeStaging, archive: Path) -> str:
    """Return the interpreter of a copy that works here. Raises TorchrelayError if there is none."""
    copy = staging.stage(archive).path
    described = EnvironmentDescription.load(copy)
    for name, target in described.links.items():
        link = copy / inside_name(name)
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another job has made it
            link.symlink_to(target)
    python = copy / inside_name(described.python)
    if not python.exists():
        raise TorchrelayError(f"{python} leads to {os.path.realpath(python)}, which is not on this node")
    _import_torch(staging.watch(archive), str(python))
    return str(python)


def _import_torch(watch: Watch, python: str) -> None:
    """Import torch in the copy, to prove that every library is found. Raises TorchrelayError if that fails.

    No time is lost: the ranks then find in memory what this import has read.
    """
    waiting = CancellableWait(watch)
    with subprocess.Popen(
        [python, "-P", "-c", "import torch"],
        env=activated_environment(os.environ, python), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            _, errors = waiting.run_in_thread(partial(process.communicate, timeout=_TRY_SECONDS))
        except BaseException as error:
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TorchrelayError(f"the copy did not import torch within {_TRY_SECONDS:.0f} s") from error
            raise
    stop_if(waiting.stopped())  # a signal that asks this node to stop ends the copy's process, too
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise TorchrelayError(f"the copy does not import torch: {lines[-1]}")
