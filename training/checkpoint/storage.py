"""Checkpoints on a disk, and snapshots in a node's memory: `step-00001200/`, visible only when complete; no torch.

Each has a manifest. `publish_directory` (`hpc/core/files.py`) does the fsync and the rename. Runs on rank 0; for
snapshots also on the first rank of each node and in the node agent; with `--strategy fsdp` on every rank.

A checkpoint that is torn or altered is renamed to `rejected-step-00001200`, and deleted once a new one is committed.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc.core.errors import TorchrelayError
from hpc.core.files import publish_directory, remove_directory, sha256_of

STATE_TENSORS, STATE_VALUES = "state.safetensors", "state.json"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_REJECTED = "rejected-"

WriteFiles = Callable[[Path], dict[str, Any] | None]


def checkpoint_path(directory: Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The optimizer steps done, from the name of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def list_checkpoints(directory: Path) -> list[Path]:
    """All checkpoints, intact or not; the newest (by its step) first."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


def save_checkpoint(
    directory: Path, step: int, write_files: WriteFiles, keep: int | None, mode: int | None = None,
    *, check: Callable[[], None] | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint and, once it is on the disk, delete all but the newest `keep`; None: delete nothing.

    `write_files` receives the checkpoint's directory, which gets the mode `mode`. It may return the manifest's entries
    for files that others have written and checked. `check` raises if the checkpoint may not be published.

    Raises:
        OSError: it could not be written; the older ones are all there.
    """

    def complete(temporary: Path) -> None:
        files = write_files(temporary) or {}
        files |= {file.name: describe_file(file) for file in sorted(temporary.iterdir()) if file.name not in files}
        (temporary / _MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2))

    path = checkpoint_path(directory, step)
    publish_directory(path, complete, mode, check=check)
    if keep is not None:
        for outdated in list_checkpoints(directory)[keep:]:
            remove_directory(outdated)
        for rejected in directory.glob(f"{_REJECTED}*"):
            shutil.rmtree(rejected, ignore_errors=True)
    return path


def reject(path: Path) -> None:
    """Mark a checkpoint as unusable."""
    path.rename(path.with_name(_REJECTED + path.name))


def describe_file(path: Path) -> dict[str, Any]:
    """The manifest's entry for a file."""
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}


def find_damage(path: Path, first: int = 0, stride: int = 1) -> str:
    """What is wrong with a checkpoint; empty if its files are as they were written.

    With its rank as `first` and the world size as `stride`, a rank checks its share of the files.

    Raises:
        TorchrelayError: the storage cannot be read. The checkpoint may be intact.
    """
    try:
        files = json.loads((path / _MANIFEST).read_bytes())["files"]
        checked = sorted(files.items())[first::stride]
        damaged = next((name for name, entry in checked if describe_file(path / name) != entry), None)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it does not match its manifest: {error!r}"
    except OSError as error:
        raise _unreadable(path, error) from error
    return f"{damaged} is not as it was written" if damaged else ""


def read_checkpoint(path: Path) -> dict[str, bytes] | str:
    """The files of a checkpoint, or what is wrong with it.

    Raises:
        TorchrelayError: the storage cannot be read. The checkpoint may be intact.
    """
    if damage := find_damage(path):
        return damage
    return {name: read_file(path / name) for name in file_names(path)}


def file_names(path: Path) -> list[str]:
    """The names of the files of an intact checkpoint.

    Raises:
        TorchrelayError: the storage cannot be read.
    """
    return list(json.loads(read_file(path / _MANIFEST))["files"])


def read_file(path: Path) -> bytes:
    """The content of a file of a checkpoint.

    Raises:
        TorchrelayError: the storage cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> TorchrelayError:
    return TorchrelayError(f"{path} cannot be read ({error}): start the run again when it can")
