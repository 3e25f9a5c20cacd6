"""Packs this node's copy of an image folder on the same disk (`--pack`). Runs on compute nodes.

The packed data are an entry of the cache like any other: the next attempt uses them again after a check of their sizes
(after a reboot, of their checksums), and they are deleted when they are old or the disk is full.
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
from hpc.staging.store import CacheEntry, Manifest, boot_id, describe_file, open_store, write_manifest
from training.config.packed_index import INDEX, read_index

_POLL_SECONDS = 0.2


def pack(stage_dir: Path, resources: ExitStack, folder: Path, size: int, watch: Watch) -> Path:
    """Pack a staged folder, unless it is packed already, and keep the packed data in use.

    Args:
        stage_dir: the directory of this node's copies.
        resources: keeps the packed data in use until it is closed.
        folder: the copy of the image folder.
        size: side of the packed images in pixels.
        watch: gets the progress, and returns whether to stop.

    Raises:
        StagingStopped: `watch` returned True. Images packed by then are not packed again.
        TorchrelayError: they cannot be packed, or the disk is full.
    """
    store = open_store(stage_dir)
    # The copy's directory is named after one version of the data set.
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
    # Beside the damaged data, which another job may have mapped into its memory.
    new, old = entry.path / "new", entry.path / f".{time.time_ns()}.old"
    command = [sys.executable, "-u", "-P", "-m", "training.pack", str(folder), str(new), f"--size={size}"]
    began = time.monotonic()
    # In its own session, so that a terminal's Ctrl-C reaches only the agent; Slurm's signals reach it all the same.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as packer:
        try:
            while packer.poll() is None:
                # Written by now, in blocks of 512 bytes. Sizes do not tell: the files are sparse.
                done = sum(512 * path.stat().st_blocks for path in entry.path.glob(".*/*.npy") if path.exists())
                seconds = time.monotonic() - began
                stop_if(watch(CopyProgress(activity="packing", bytes_done=done, seconds=seconds)))
                time.sleep(_POLL_SECONDS)
        except BaseException:
            packer.send_signal(signal.SIGTERM)
            raise
    if packer.returncode:
        raise TorchrelayError(
            f"{folder} could not be packed (exit code {packer.returncode}; see the error above in this log): "
            "use --pack off, or a larger --stage-dir if its disk is full"
        )
    if entry.data.exists():
        entry.data.rename(old)
    new.rename(entry.data)
    shutil.rmtree(old, ignore_errors=True)
    index = read_index(entry.data)
    names = (INDEX, *(file.name for file in index.files))
    files = [describe_file(entry.data, name, lambda: watch(None)) for name in names]
    write_manifest(entry.path, Manifest(source=index.source, boot=boot_id(), files=tuple(files)))
