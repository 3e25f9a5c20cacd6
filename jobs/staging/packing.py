"""Decodes this node's copy of an image folder once, beside it (`--pack`). Runs on compute nodes.

The packed data are a copy like any other: used again by the next attempt, checked by size and after a power cut byte by
byte, deleted when they are old or the disk is full.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.staging.copy_progress import CopyProgress, Watch, stop_if
from hpc.staging.manifest import Manifest, boot_id, describe_file, write_manifest
from hpc.staging.store import CacheEntry, open_store
from training.config.packed_index import INDEX, read_index

_POLL_SECONDS = 0.2


def pack(stage_dir: Path, resources: ExitStack, folder: Path, size: int, watch: Watch) -> Path:
    """Have the images of a staged folder as packed data on this node's disk, in use until the attempt is over.

    Args:
        stage_dir: where this node keeps its copies.
        resources: keeps the packed data in use until it is closed.
        folder: the copy of the image folder.
        size: side of the packed images in pixels.
        watch: is told how far it is, and says whether to stop.

    Raises:
        StagingStopped: it said so. What is packed by then is not packed again.
        TorchrelayError: they cannot be packed, or there is no room.
    """
    store = open_store(stage_dir)
    # What is packed belongs to one version of the data set, whose name the copy's directory has.
    version = folder.relative_to(store.root).parts[0]
    entry = store.entry(f"{version}-{size}px")

    def wait() -> None:
        stop_if(watch(None))
        time.sleep(_POLL_SECONDS)

    while (in_use := entry.lock_for_use()) is None:
        wait()
    resources.callback(os.close, in_use)
    with entry.locked_for_copy(wait):
        manifest = entry.manifest()
        if manifest is None or entry.find_damaged(manifest, lambda: watch(None)):
            images = store.entry(version).manifest()
            _, shortage = store.make_room(3 * size * size * len(images.files) if images else 0, 0)
            if shortage:
                raise TorchrelayError(f"{shortage}: use --pack off, or --stage-dir with a larger disk")
            _make(entry, folder, size, watch)
    entry.mark_used()
    return entry.data


def _make(entry: CacheEntry, folder: Path, size: int, watch: Watch) -> None:
    (entry.path / "manifest").unlink(missing_ok=True)
    entry.path.mkdir(mode=0o700, exist_ok=True)
    # Beside the damaged one, which another job may have mapped into its memory.
    new, old = entry.path / "new", entry.path / f".{time.time_ns()}.old"
    _run([str(folder), str(new), f"--size={size}"], entry.path, watch)
    if entry.data.exists():
        entry.data.rename(old)
    new.rename(entry.data)
    shutil.rmtree(old, ignore_errors=True)
    index = read_index(entry.data)
    files = [describe_file(entry.data, name) for name in (INDEX, *(file.name for file in index.files))]
    write_manifest(entry.path, Manifest(source=index.source, boot=boot_id(), files=tuple(files)))


def _run(arguments: list[str], place: Path, watch: Watch) -> None:
    began = time.monotonic()
    command = [sys.executable, "-u", "-P", "-m", "training.pack", *arguments]
    # In a session of its own: Slurm's signals reach it all the same, and a terminal's Ctrl-C through `watch` alone.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as packer:
        try:
            while packer.poll() is None:
                done, seconds = _bytes_in(place), time.monotonic() - began
                stop_if(watch(CopyProgress(activity="packing", bytes_done=done, seconds=seconds)))
                time.sleep(_POLL_SECONDS)
        except BaseException:
            packer.send_signal(signal.SIGTERM)
            raise
    if packer.returncode:
        raise TorchrelayError(
            f"{arguments[0]} could not be packed (exit code {packer.returncode}; the reason stands above in "
            "this log): use --pack off, or a larger --stage-dir if it was the room"
        )


def _bytes_in(place: Path) -> int:
    """Bytes written by now: the files are sparse, and have their sizes from the beginning."""
    return sum(512 * path.stat().st_blocks for path in place.glob(".*/*.npy") if path.exists())
