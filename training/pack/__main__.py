"""`python -m training.pack SRC DST`: decodes an image folder once, so that trainings need not do it in every epoch.

Runs anywhere, as one process that starts others; needs no torch. The files are made in a directory beside DST, which is
renamed to DST when all files are complete. After a kill, the next packer continues with the images without a record.
"""

import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from hpc.base import program
from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import expanded, fsync_directory, write_atomic
from hpc.base.flags import Flag
from hpc.base.text import visible
from hpc.run.nodedir import open_lock, try_lock
from training.config.dataset_layout import check_classes, check_data, find_data
from training.config.packed_index import INDEX, PackedFile, PackedPart, PackIndex, read_index, write_index
from training.data.file_index import build_index
from training.data.worker_process import die_with_parent
from training.pack.split_writer import CHANNELS, SplitWriter, has_records, pack_splits

_LOCK = ".lock"
_PLAN = ".plan"


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Decode the images of a folder once, into files that every training with --data DST maps into memory.

    Each image is scaled so that its shorter side is --size, and its middle square is kept: the margins of the longer
    side are cut off. Random crops (RandomResizedCrop, --crop resized) are then cut from that square instead of the
    whole image, and crops smaller than --image-size are enlarged. Evaluations crop the same part of an image as without
    packing, but resize it once more. Images that cannot be decoded are marked: trainings replace, count and name them
    as they do those of a folder.

    After a signal, a kill or a full disk, the same command resumes where it was. Exit code 0: DST is complete; 1: it
    failed; 2: your mistake (one line says what to type); 143: ended by SIGTERM.
    """

    src: Annotated[Path, Flag(metavar="SRC", is_positional=True)]
    """The image folder: class directories, or train/ (and val/, test/) with class directories."""
    dst: Annotated[Path, Flag(metavar="DST", is_positional=True)]
    """A new directory for the packed data."""
    size: int = 256
    """Side of the packed squares in pixels: 256 suits a training with 224. An image takes 3 x size x size bytes."""
    num_workers: int | None = None
    """Processes that decode. Default: the usable CPU cores. The files do not depend on it."""


def main() -> int:
    """Run the program, and return its exit code."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    options = program.parse(PackOptions, sys.argv[1:], program.called("training.pack"))
    for name, minimum in (("size", 8), ("num_workers", 1)):
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} is {value}: use {minimum} or more")
    pack(options, options.num_workers or len(os.sched_getaffinity(0)))
    return 0


def _identity(index: PackIndex) -> str:
    """Return what identifies a packed data set: a hash of the size, and of the classes, labels and names of images."""
    tables = {part.name: [part.labels.sha256, part.names.sha256] for part in index.parts}
    return hashlib.sha256(json.dumps([index.size, index.classes, tables]).encode()).hexdigest()


def _check_resumable(directory: Path, index: PackIndex) -> None:
    """Check that a directory was begun for the images and size of `index`. If no image is packed yet, record both."""
    plan, identity = directory / _PLAN, _identity(index)
    if not has_records(directory):
        write_atomic(plan, identity)
    elif not plan.exists() or plan.read_text() != identity:
        raise UserError(
            f"{directory} was begun with other images in SRC, or with another --size: use the same, or start over: "
            f"rm -r '{directory}'"
        )


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def list_images(src: Path, dst: Path, size: int) -> tuple[PackIndex, dict[str, np.ndarray]]:
    """Return the index without the files of pixels, and the arrays of labels and names by file name.

    Raises UserError if SRC is not an image folder, a directory in it cannot be read, or DST is inside SRC.
    """
    if not src.is_dir():
        raise UserError(f"SRC is {src}, which is not a directory: give the image folder")
    try:
        layout = check_data(src)
    except UserError as error:
        raise UserError(str(error).replace("--data is", "SRC is", 1)) from error
    if layout.kind != "image-folder":
        raise UserError(f"{src} needs no packing: train from it as it is (--data {src})")
    if dst.resolve().is_relative_to(src.resolve()):
        raise UserError(f"DST is {dst}, which is inside SRC: give a directory outside of {src}")
    try:
        for warning in check_classes(layout):
            print(visible(f"warning: {warning}"), flush=True)
        listing = build_index(layout)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be listed ({error.strerror}): restore or remove it") from error
    parts, tables = [], dict[str, np.ndarray]()
    for name, part in listing.parts.items():
        root: Path = getattr(layout, name)
        prefix = "" if root == src else f"{root.relative_to(src)}/"
        files = {}
        for table, array in (("labels", part.labels), ("names", np.char.add(prefix.encode(), part.names))):
            content = _npy(array)
            digest = hashlib.sha256(content).hexdigest()
            files[table] = PackedFile(name=f"{name}-{table}.npy", bytes=len(content), sha256=digest)
            tables[files[table].name] = array
        pixels = PackedFile(name=f"{name}-pixels.npy", bytes=0, sha256="")
        parts.append(PackedPart(name=name, images=len(part.names), corrupt=(), pixels=pixels, **files))
    return PackIndex(size=size, classes=listing.classes, parts=tuple(parts), source=str(src)), tables


def pack(options: PackOptions, workers: int) -> None:
    """Pack SRC into DST, unless DST is complete already.

    Raises UserError if SRC is not an image folder or has changed, DST holds something else, or the disk is too small;
    or TorchrelayError if another process packs into DST, or the disk is full.
    """
    src, dst = (Path(os.path.abspath(expanded(path))) for path in (options.src, options.dst))  # noqa: PTH100
    src = find_data(src)  # an archive may have a directory around the data
    index, tables = list_images(src, dst, options.size)
    images = sum(part.images for part in index.parts)
    if _is_packed(dst, index):
        print(f"{dst} is packed already: {images} images")
        return
    with _working_directory(dst) as directory, _pool(workers) as pool, _explained(directory):
        if _is_packed(dst, index):  # by another process, since the check above
            shutil.rmtree(directory)
            return
        _check_resumable(directory, index)
        splits = [
            SplitWriter(directory / part.pixels.name, src, tables[part.names.name], index.size) for part in index.parts
        ]
        missing = images - sum(split.done for split in splits)
        needed, free = missing * CHANNELS * index.size**2, shutil.disk_usage(directory).free
        if needed > free:
            raise UserError(
                f"{directory.parent} has {free // 2**20} MB free, and the packed images need {needed // 2**20} MB: "
                "free some space, use a smaller --size, or give another DST"
            )
        pack_splits(splits, pool, workers)
        for name, array in tables.items():
            write_atomic(directory / name, _npy(array))
        parts = zip(index.parts, splits, strict=True)
        index = replace(
            index, parts=tuple(replace(part, pixels=split.file, corrupt=split.corrupt) for part, split in parts)
        )
        write_index(directory, index)
        directory.rename(dst)
        fsync_directory(dst.parent)
        for hidden in dst.glob(".*"):  # records, plan and lock, which are no longer needed
            hidden.unlink()
    megabytes = sum(file.bytes for file in index.files) / 2**20
    size = f"{images} images of {index.size} x {index.size} pixels, {megabytes:.0f} MB"
    print(f"{dst}: {size}: train with --data {dst}")
    if corrupt := sum(len(part.corrupt) for part in index.parts):
        print(f"{corrupt} images cannot be decoded and are marked: trainings use others (--max-corrupt-images)")


def _is_packed(dst: Path, index: PackIndex) -> bool:
    """Return whether DST is complete. Raises UserError if DST holds something else."""
    if not (dst / INDEX).exists():
        if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
            raise UserError(f"{dst} exists and is not a packed data set: give a new directory")
        return False
    if _identity(read_index(dst)) != _identity(index):
        raise UserError(f"{dst} was packed from other images, or with another --size: give a new directory")
    check_data(dst)
    return True


@contextmanager
def _working_directory(dst: Path) -> Iterator[Path]:
    """Make and lock the directory in which the files are made. At the end, remove it if no image was packed."""
    directory = dst.parent / f".{dst.name}.packing"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = open_lock(directory / _LOCK)
    except OSError as error:
        raise UserError(f"{directory} cannot be made ({error.strerror}): give another DST") from error
    try:
        # If the lock file does not exist any more, another process has completed DST meanwhile.
        if not try_lock(descriptor) or not (directory / _LOCK).exists():
            raise TorchrelayError(f"another process packs into {dst}: wait for it, or give another DST")
        try:
            yield directory
        finally:
            if directory.exists() and not has_records(directory):
                shutil.rmtree(directory)
    finally:
        os.close(descriptor)


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes that decode. They ignore the signals that the packer handles, and die with the packer."""
    signals = ((signal.SIGTERM, signal.SIGINT),)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), die_with_parent, signals)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Tell how to resume, after a killed worker, an OSError or a stop in the `with` block."""
    again = f"the same command resumes with the images packed in {directory}"
    try:
        yield
    except BrokenProcessPool as error:
        raise TorchrelayError(f"a worker was killed (out of memory?): use fewer --num-workers; {again}") from error
    except OSError as error:
        raise TorchrelayError(f"{error.filename or directory}: {error.strerror}: fix that; {again}") from error
    except (SystemExit, KeyboardInterrupt):
        print(f"stopped: {again}", file=sys.stderr)
        raise


if __name__ == "__main__":
    sys.exit(program.run(main))
