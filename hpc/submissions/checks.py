"""Checks a submission before anything is queued. Runs on the login node.

Each check raises UserError with the flag, its value, and what to type.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpc.base.errors import NotNowError, UserError
from hpc.base.files import UNSUPPORTED, expanded, nearest_existing
from hpc.base.kernel import file_system_type
from hpc.run.ownership import who_may_rename
from hpc.run.spec import Cluster, RunSpec

_NODE_LOCAL = (Path("/tmp"), Path("/dev/shm"))  # noqa: S108 - these are refused, not used
# The space that the files of a run need besides its checkpoints.
_MIN_FREE_BYTES = 64 * 2**20


def lacks_hard_links(directory: Path) -> bool:
    """Return whether the file system of a directory has no hard links. The directory need not exist.

    Raises:
        OSError: nothing can be written there.
    """
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=nearest_existing(directory)) as name:
        probe = Path(name)
        (probe / "file").touch()
        try:
            os.link(probe / "file", probe / "link")
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return True
    return False


def check_setup(lines: Sequence[str], cluster: Cluster) -> None:
    """Refuse --setup with --cluster local, and lines that are not valid Bash."""
    if lines and cluster == "local":
        raise UserError(
            f"--setup is {lines[0]!r}, but --cluster local has no batch script: type it in this shell before hpc submit"
        )
    for line in lines:
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            problem = done.stderr.strip().partition("\n")[0].removeprefix("bash: -c: ")
            raise UserError(f"--setup {line!r} is not valid Bash ({problem}): write each --setup as a whole command")


def check_recovery(spec: RunSpec) -> None:
    """Refuse flags without effect, and a --signal-before or --grace-period that is not shorter than the time limit."""
    way = None if spec.recovery.continue_with == "auto" else spec.recovery.continue_with
    for flag, value, why in (
        ("--spares", spec.recovery.spares, "has no spare nodes"),
        ("--continue-with", way, "always requeues"),
        ("--interface", spec.network.interface, "has no network between nodes"),
    ):
        if value and spec.cluster == "local":
            raise UserError(f"{flag} is {value}, but --cluster local {why}: leave it out")
    if spec.stop_signal and not spec.program.isolated:
        name = spec.recovery.stop_signal
        raise UserError(f"--stop-signal is {name}, but it applies only to your own script: leave it out")
    least = spec.resources.time_min and spec.resources.time_min.typed
    shortest, longer, may_be = (least, "--time-min", "may be") if least else (spec.resources.time_limit, "--time", "is")
    flag, lead = "--signal-before", spec.recovery.signal_before
    if lead is None:
        flag, lead = "--grace-period", spec.recovery.grace_period
    if lead and spec.stop_lead_seconds >= shortest.seconds:
        raise UserError(
            f"{flag} is {lead}, but the time limit {may_be} {shortest}: use a shorter {flag} or a longer {longer}"
        )


def check_runs_dir(runs_dir: Path, *, on_cluster: bool) -> None:
    """Refuse a runs directory that nodes cannot see, that others may change, or whose storage cannot hold a run."""
    if on_cluster:
        check_is_shared("--runs-dir", expanded(runs_dir))
    real = expanded(runs_dir).resolve()
    if any(character in str(real) for character in "%\\\n"):
        raise UserError(f"--runs-dir {str(runs_dir)!r}: Slurm replaces % and \\ in file names; use another path")
    existing = nearest_existing(real)
    if not existing.is_dir():
        raise UserError(f"--runs-dir {runs_dir}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--runs-dir {runs_dir}: {existing} is not writable; use a directory of your own")
    if existing == real and (problem := who_may_rename(real)):
        raise UserError(f"--runs-dir {runs_dir}: {problem}; use a directory of your own")
    free = shutil.disk_usage(existing).free
    if free < _MIN_FREE_BYTES:
        raise NotNowError(
            f"--runs-dir {runs_dir}: its file system is full ({free // 2**20} MB free): free some space, or use another"
        )
    if lacks_hard_links(real):
        raise UserError(
            f"--runs-dir {runs_dir}: its file system ({file_system_type(real)}) has no hard links, so two jobs of a "
            "run could both train it: use a directory on other storage"
        )


def is_node_local(path: Path) -> bool:
    """Return whether a path is in /tmp or /dev/shm, which other nodes cannot see."""
    return any(path.resolve().is_relative_to(local) for local in _NODE_LOCAL)


def check_is_shared(flag: str, path: Path | None) -> None:
    """Refuse a path that other nodes cannot see."""
    if path is not None and is_node_local(path):
        raise UserError(f"{flag} {path} is on this node's own disk: use a directory that all nodes share")
