"""`python -m training.pack SRC DST`: decodes an image folder once, so that trainings need not do it in every epoch.

Runs anywhere, as one process that starts others; needs no torch. The files are made in a directory beside DST, which is
renamed to DST when all is complete. A packer that was ended, however that was, goes on after its last whole shard.
"""

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
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
from hpc.core.files import fsync_directory, sha256_of
from hpc.core.nodedir import open_lock, try_lock
from training.config.dataset_layout import check_data
from training.config.packed_index import INDEX, PackIndex, read_index
from training.pack.plan import PackPlan, make_plan, same_content
from training.pack.progress import PackProgress
from training.pack.shard_writer import Shard
from training.pack.work import begin_worker, complete, pack_shards, whole_shards

_LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Decode the images of a folder once, into files that every training maps into memory: --data DST.

    Each image is scaled so that its shorter side is --size, and its middle square is kept: what the margins of the
    longer side show is gone. Random crops (RandomResizedCrop, --crop resized) are then cut from that square instead of
    the whole image, and those smaller than --image-size are enlarged; an evaluation sees what it saw before. Images
    that cannot be decoded are marked: trainings replace, count and name them as they do those of a folder.

    Ended by a signal, a kill or a full disk, the same command goes on after the last whole shard. Exit code 0: DST is
    complete; 1: it failed, 2: your mistake (one line says what to type); 143: it was ended by SIGTERM.
    """

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """The image folder: class directories, or train/ (and val/, test/) with class directories."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """A new directory for the packed data."""
    size: int = 256
    """Side of the packed squares in pixels: 256 suits a training with 224. An image takes 3 x size x size bytes."""
    workers: int | None = None
    """Processes that decode; by default as many as there are usable cores. The files do not depend on it."""
    shard_mb: int = 256
    """Size of the files in MB, at most: what a killed packer repeats."""
    verify: bool = False
    """Pack nothing: read the packed data in DST, and compare all with the checksums."""


def main() -> int:
    """From the command line to the exit code."""
    signal.signal(signal.SIGTERM, _end)
    if not sys.stdout.isatty():
        # A log that is read while it is written needs whole lines at once.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a TextIOWrapper
    return program.run(_work)


def _work() -> int:
    arguments = program.parse(PackOptions, sys.argv[1:], "python -m training.pack")
    workers = check_arguments(arguments)
    if arguments.verify:
        verify(arguments.dst, workers)
    else:
        pack(arguments, workers)
    return 0


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def check_arguments(arguments: PackOptions) -> int:
    """The number of worker processes.

    Raises:
        UserError: a flag cannot work.
    """
    least = {"size": 8, "workers": 1, "shard_mb": 1}
    for name, bound in least.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            raise UserError(f"--{name.replace('_', '-')} is {value}: use {bound} or more")
    return arguments.workers or len(os.sched_getaffinity(0))


def pack(arguments: PackOptions, workers: int) -> None:
    """Make DST, unless it is complete already.

    Raises:
        UserError: SRC is no image folder or is no longer what it was, or DST is something else.
        TorchrelayError: another process packs into DST, or the disk is full.
    """
    src, dst = (Path(os.path.abspath(path.expanduser())) for path in (arguments.src, arguments.dst))  # noqa: PTH100
    _check_place(src, dst)
    plan = make_plan(src, arguments.size, arguments.shard_mb * 2**20)
    if _is_packed(dst, plan):
        print(f"{dst} is packed already: {plan.images} images")
        return
    with _directory(dst) as directory, _pool(workers) as pool, _told(directory):
        if _is_packed(dst, plan):  # since another process had the directory
            shutil.rmtree(directory)
            return
        plan.settle(directory)
        shards, records = plan.shards(directory), whole_shards(plan, directory, pool)
        missing = [shard for shard in shards if shard.name not in records]
        _check_space(missing, directory)
        with PackProgress(plan.images, plan.images - sum(len(shard.paths) for shard in missing)) as progress:
            records |= pack_shards(missing, pool, workers, progress)
        index = complete(plan, directory, records)
        _publish(directory, dst)
    _tell(index, dst)


def _check_place(src: Path, dst: Path) -> None:
    if not src.is_dir():
        raise UserError(f"SRC is {src}, which is no directory: give the image folder")
    try:
        layout = check_data(src)
    except UserError as error:
        raise UserError(str(error).replace("--data is", "SRC is", 1)) from error
    if layout.kind != "image-folder":
        raise UserError(f"{src} needs no packing: train from it as it is (--data {src})")
    if dst.resolve().is_relative_to(src.resolve()):
        raise UserError(f"{dst} lies in the images themselves: give a directory outside of {src}")


def _is_packed(dst: Path, plan: PackPlan) -> bool:
    """Whether DST is there already.

    Raises:
        UserError: it is, but it is something else.
    """
    if not (dst / INDEX).exists():
        if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
            raise UserError(f"{dst} exists and is no packed data set: give a new directory")
        return False
    if not same_content(read_index(dst), plan):
        raise UserError(
            f"{dst} was packed from other images, or with another --size or --shard-mb: give a new directory"
        )
    check_data(dst)
    return True


@contextmanager
def _directory(dst: Path) -> Iterator[Path]:
    """The directory that the files are made in, for this process alone."""
    directory = dst.parent / f".{dst.name}.packing"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = open_lock(directory / _LOCK)
    except OSError as error:
        raise UserError(f"{directory} cannot be made ({error.strerror}): give another DST") from error
    try:
        # Of a lock file that is no longer there, another process has made DST meanwhile.
        if not try_lock(descriptor) or not (directory / _LOCK).exists():
            raise TorchrelayError(f"another process packs into {dst}: wait for it, or give another DST")
        try:
            yield directory
        finally:
            if directory.exists() and not any(directory.glob("*.npy")):
                shutil.rmtree(directory)  # nothing in it is worth going on with
    finally:
        os.close(descriptor)


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that decode. What they have begun is waited for, what they have not is given up."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=begin_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Whatever ends it here, what is whole stays."""
    again = f"the same command goes on with what is whole in {directory}"
    try:
        yield
    except BrokenProcessPool as error:
        raise TorchrelayError(
            f"a worker was killed, for lack of memory perhaps: use fewer --num-workers; {again}"
        ) from error
    except OSError as error:
        raise TorchrelayError(f"{error.filename or directory}: {error.strerror}: mend that; {again}") from error
    except (SystemExit, KeyboardInterrupt):
        print(f"stopped: {again}", file=sys.stderr)
        raise


def _check_space(missing: Sequence[Shard], directory: Path) -> None:
    needed, room = sum(shard.bytes for shard in missing), shutil.disk_usage(directory).free
    if needed > room:
        raise UserError(
            f"{directory.parent} has room for {room // 2**20} MB, and what is to be packed needs {needed // 2**20} MB: "
            "make room, use a smaller --size, or give another DST"
        )


def _publish(directory: Path, dst: Path) -> None:
    """Give the complete directory its name. Killed after that, it has needless hidden files; before, all it needs."""
    directory.rename(dst)
    fsync_directory(dst.parent)
    for hidden in dst.glob(".*"):
        hidden.unlink()


def _tell(index: PackIndex, dst: Path) -> None:
    images, corrupt = (sum(counts) for counts in zip(*((p.images, len(p.corrupt)) for p in index.parts), strict=True))
    size = sum(file.bytes for file in index.files) / 2**20
    print(f"{dst}: {images} images of {index.size} x {index.size} pixels, {size:.0f} MB: train with --data {dst}")
    if corrupt:
        print(
            f"{corrupt} images cannot be decoded and are marked: trainings show others instead (--max-corrupt-images)"
        )


def verify(dst: Path, workers: int) -> None:
    """Compare a packed data set with its checksums.

    Raises:
        UserError: it is none, or a file is not what it was.
    """
    layout = check_data(dst)
    if layout.kind != "packed":
        raise UserError(f"{dst} is no packed data set: give one that python -m training.pack made")
    files = list(read_index(dst).files)
    with _pool(workers) as pool:
        for file, found in zip(files, pool.map(sha256_of, [dst / file.name for file in files]), strict=True):
            if found != file.sha256:
                raise UserError(f"{dst / file.name} does not have its checksum: copy it again, or pack again")
    print(f"{dst}: all {len(files)} files have their checksums")


if __name__ == "__main__":
    sys.exit(main())
