"""`python -m training.pack SRC DST`: decodes an image folder once, so that trainings need not do it in every epoch.

Runs anywhere, as one process that starts others; needs no torch. The files are made in a directory beside DST, which is
renamed to DST when all are complete. A packer that was killed resumes with the images that have no record.
"""

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import tyro

from hpc.core import program
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.files import fsync_directory, sha256_of, write_atomic
from hpc.core.nodedir import open_lock, try_lock
from training.config.dataset_layout import check_data
from training.config.packed_index import INDEX, PackedFile, PackedPart, PackIndex, read_index, write_index
from training.pack.plan import PackPlan, make_plan
from training.pack.split_writer import CHANNELS, PackProgress, SplitWriter, has_records, pack_splits, pixels_sha256
from training.runtime.signals import die_with_parent

_LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Decode the images of a folder once, into files that every training maps into memory: --data DST.

    Each image is scaled so that its shorter side is --size, and its middle square is kept: the margins of the longer
    side are cut off. Random crops (RandomResizedCrop, --crop resized) are then cut from that square instead of the
    whole image, and crops smaller than --image-size are enlarged; an evaluation sees the same pixels as before. Images
    that cannot be decoded are marked: trainings replace, count and name them as they do those of a folder.

    After a signal, a kill or a full disk, the same command resumes where it was. Exit code 0: DST is complete; 1: it
    failed; 2: your mistake (one line says what to type); 143: ended by SIGTERM.
    """

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """The image folder: class directories, or train/ (and val/, test/) with class directories."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """A new directory for the packed data."""
    size: int = 256
    """Side of the packed squares in pixels: 256 suits a training with 224. An image takes 3 x size x size bytes."""
    num_workers: int | None = None
    """Processes that decode. Default: the usable CPU cores. The files do not depend on it."""
    verify: bool = False
    """Pack nothing: compare the packed data in DST with their checksums."""


def main() -> int:
    """From the command line to the exit code."""
    signal.signal(signal.SIGTERM, _exit)
    if not sys.stdout.isatty():
        # A log that is read while it is written needs whole lines at once.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a TextIOWrapper
    return program.run(_work)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _work() -> int:
    options = program.parse(PackOptions, sys.argv[1:], "python -m training.pack")
    for name, least in (("size", 8), ("num_workers", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}: use {least} or more")
    workers = options.num_workers or len(os.sched_getaffinity(0))
    verify(options.dst, workers) if options.verify else pack(options, workers)
    return 0


def pack(options: PackOptions, workers: int) -> None:
    """Make DST, unless it is complete already.

    Raises:
        UserError: SRC is no image folder or has changed, or DST is something else.
        TorchrelayError: another process packs into DST, or the disk is full.
    """
    src, dst = (Path(os.path.abspath(path.expanduser())) for path in (options.src, options.dst))  # noqa: PTH100
    _check_paths(src, dst)
    plan = make_plan(src, options.size)
    if _is_packed(dst, plan):
        print(f"{dst} is packed already: {plan.images} images")
        return
    with _working_directory(dst) as directory, _pool(workers) as pool, _explained(directory):
        if _is_packed(dst, plan):  # by another process, since the check above
            shutil.rmtree(directory)
            return
        plan.check_resumable(directory)
        splits = {name: SplitWriter(directory, name, src, part.names, plan.size) for name, part in plan.parts.items()}
        done = sum(split.done for split in splits.values())
        _check_space(directory, (plan.images - done) * CHANNELS * plan.size**2)
        pack_splits(list(splits.values()), pool, workers, PackProgress(plan.images, done))
        index = _complete(plan, directory, splits)
        _publish(directory, dst)
    _print_result(index, dst)


def _check_paths(src: Path, dst: Path) -> None:
    if not src.is_dir():
        raise UserError(f"SRC is {src}, which is no directory: give the image folder")
    try:
        layout = check_data(src)
    except UserError as error:
        raise UserError(str(error).replace("--data is", "SRC is", 1)) from error
    if layout.kind != "image-folder":
        raise UserError(f"{src} needs no packing: train from it as it is (--data {src})")
    if dst.resolve().is_relative_to(src.resolve()):
        raise UserError(f"DST is {dst}, which is inside SRC: give a directory outside of {src}")


def _is_packed(dst: Path, plan: PackPlan) -> bool:
    """Whether DST is complete.

    Raises:
        UserError: DST exists, but is something else.
    """
    if not (dst / INDEX).exists():
        if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
            raise UserError(f"{dst} exists and is no packed data set: give a new directory")
        return False
    if not plan.matches(read_index(dst)):
        raise UserError(f"{dst} was packed from other images, or with another --size: give a new directory")
    check_data(dst)
    return True


@contextmanager
def _working_directory(dst: Path) -> Iterator[Path]:
    """The directory that the files are made in, locked for this process."""
    directory = dst.parent / f".{dst.name}.packing"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = open_lock(directory / _LOCK)
    except OSError as error:
        raise UserError(f"{directory} cannot be made ({error.strerror}): give another DST") from error
    try:
        # If the lock file is gone, another process has completed DST meanwhile.
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
    """Processes that decode. They ignore the signals that the packer handles, and die with it."""
    signals = ((signal.SIGTERM, signal.SIGINT),)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), die_with_parent, signals)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Add to every failure that packed images are kept."""
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


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"{directory.parent} has {free // 2**20} MB free, and the packed images need {needed // 2**20} MB: "
            "free some space, use a smaller --size, or give another DST"
        )


def _complete(plan: PackPlan, directory: Path, splits: dict[str, SplitWriter]) -> PackIndex:
    """Write the labels and names, then the index."""
    parts = []
    for name, split in splits.items():
        tables = {}
        for table, content in plan.tables(name).items():
            path = directory / f"{name}-{table}.npy"
            write_atomic(path, content)
            tables[table] = PackedFile(name=path.name, bytes=len(content), sha256=sha256_of(path))
        parts.append(
            PackedPart(name=name, images=len(split.names), corrupt=split.corrupt, pixels=split.packed, **tables)
        )
    index = PackIndex(size=plan.size, classes=plan.classes, parts=tuple(parts), source=str(plan.source))
    write_index(directory, index)
    return index


def _publish(directory: Path, dst: Path) -> None:
    """Rename the complete directory, then remove its hidden files, which nobody needs any more."""
    directory.rename(dst)
    fsync_directory(dst.parent)
    for hidden in dst.glob(".*"):
        hidden.unlink()


def _print_result(index: PackIndex, dst: Path) -> None:
    images, corrupt = (sum(counts) for counts in zip(*((p.images, len(p.corrupt)) for p in index.parts), strict=True))
    size = sum(file.bytes for file in index.files) / 2**20
    print(f"{dst}: {images} images of {index.size} x {index.size} pixels, {size:.0f} MB: train with --data {dst}")
    if corrupt:
        print(f"{corrupt} images cannot be decoded and are marked: trainings use others (--max-corrupt-images)")


def verify(dst: Path, workers: int) -> None:
    """Compare a packed data set with its checksums.

    Raises:
        UserError: DST is no packed data set, or a file is damaged.
    """
    if check_data(dst).kind != "packed":
        raise UserError(f"{dst} is no packed data set: give one that python -m training.pack made")
    index = read_index(dst)
    with _pool(workers) as pool:
        for part in index.parts:
            found = {file.name: sha256_of(dst / file.name) for file in (part.labels, part.names)}
            found[part.pixels.name] = pixels_sha256(dst / part.pixels.name, part.images, pool)
            for file in part.files:
                if found[file.name] != file.sha256:
                    raise UserError(f"{dst / file.name} does not have its checksum: copy it again, or pack again")
    print(f"{dst}: all {len(list(index.files))} files have their checksums")


if __name__ == "__main__":
    sys.exit(main())
