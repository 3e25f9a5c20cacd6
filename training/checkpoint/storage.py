"""Durable checkpoints: `checkpoints/step-00001200/`, there only when complete, each with a manifest. Runs on rank 0.

A checkpoint is a few files of bytes; what they mean is the business of `training.checkpoint.state`. A torn or
altered one is set aside as `rejected-step-00001200`, and deleted once a new one has been committed.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from hpc.core.errors import TorchrelayError
from hpc.core.files import publish_directory, sha256_of

STATE_FILES = TENSORS, NUMBERS = "state.safetensors", "state.json"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_REJECTED = "rejected-"


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The optimizer steps done, by the name of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def list_checkpoints(directory: Path) -> list[Path]:
    """All checkpoints, the newest (by its step) first; no promise that they are intact."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


Fill = Callable[[Path], dict[str, Any] | None]
_Found = TypeVar("_Found")


def save_checkpoint(directory: Path, step: int, fill: Fill, keep: int | None, mode: int | None = None) -> Path:
    """Write a checkpoint and then, when it is on the disk, delete all but the newest `keep`.

    Args:
        directory: of the checkpoints.
        step: the optimizer steps done.
        fill: writes the checkpoint's files into the directory that it is given; what it returns are the descriptions,
            for the manifest, of those that others have written and looked at.
        keep: checkpoints to keep; None: all, those included that were set aside.
        mode: of the checkpoint's directory, by default as the process makes them.

    Raises:
        OSError: it could not be written; the older ones are all there.
    """

    def complete(temporary: Path) -> None:
        files = fill(temporary) or {}
        files |= {file.name: described(file) for file in sorted(temporary.iterdir()) if file.name not in files}
        (temporary / _MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2))

    path = checkpoint_path(directory, step)
    publish_directory(path, complete, mode)
    if keep is not None:
        for outdated in [*list_checkpoints(directory)[keep:], *directory.glob(f"{_REJECTED}*")]:
            shutil.rmtree(outdated, ignore_errors=True)
    return path


def set_aside(path: Path) -> None:
    """Have nobody take a checkpoint for a good one any more."""
    path.rename(path.with_name(_REJECTED + path.name))


def read_checkpoint(path: Path) -> dict[str, bytes] | str:
    """The files of a checkpoint, or what is wrong with it.

    Raises:
        TorchrelayError: the storage does not give them. That says nothing of the checkpoint, which may be intact.
    """
    return _by_manifest(path, lambda files: _wrong(path, files) or _contents(path, files))


def damage(path: Path, turn: int = 0, turns: int = 1) -> str:
    """What is wrong with the files of a checkpoint; nothing if they are as they were written.

    Args:
        path: of the checkpoint.
        turn: of the first file to look at,
        turns: and of which on the next one is: 3 is every third, where three share the work.

    Raises:
        TorchrelayError: the storage does not give them.
    """
    return _by_manifest(path, lambda files: _wrong(path, dict(sorted(files.items())[turn::turns])))


def _by_manifest(path: Path, look: Callable[[dict[str, Any]], _Found]) -> _Found | str:
    """What is found by looking at files and what the manifest says of them, or what is wrong with it."""
    try:
        return look(json.loads((path / _MANIFEST).read_bytes())["files"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest does not work: {error!r}"
    except OSError as error:
        raise _unreadable(path, error) from error


def _wrong(path: Path, files: dict[str, Any]) -> str:
    wrong = [name for name, known in files.items() if described(path / name) != known]
    return f"{wrong[0]} is not as it was written" if wrong else ""


def _contents(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in names}


def read_file(path: Path) -> bytes:
    """The content of a file of a checkpoint.

    Raises:
        TorchrelayError: the storage does not give it.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> TorchrelayError:
    return TorchrelayError(f"{path} cannot be read ({error}): start the run again when it can")


def described(path: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}
