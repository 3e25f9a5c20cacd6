"""The environment as one file that nodes can fetch and unpack: made once, kept for as long as runs need it.

Runs on the login node. A shared file system hands out one large file in seconds, and the 30,000 small ones of an
environment in minutes, at every start of every rank.
"""

import contextlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, cast

import zstandard

from hpc.cli import all_runs
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.files import fsync_directory
from hpc.core.kernel import is_alive, start_time
from hpc.core.nodedir import user_name
from hpc.submit.python_environment import PackedFileEntry, PythonEnvironment

DIRECTORY, DESCRIPTION = ".environments", "torchrelay-environment.json"
# Of zstd's levels, 1 takes three quarters of the time of 3, for 8% more bytes.
_LEVEL = 1
# The login node is everybody's.
_MOST_THREADS = 8
_PIECE_BYTES = 2**20
_KEEP_SECONDS = 7 * 86400
# Whoever packs writes all the time: a temporary file of another machine that is older is one of a dead process.
_DEAD_SECONDS = 3600
_LONGEST_SCRIPT = 2**20
# To the shell the second line is a no-op, to Python the start of a string that ends after the third.
_PORTABLE = """#!/bin/sh
''':'
exec "${0%/*}/python" "$0" "$@"
'''
"""

Progress = Callable[[int], object]
"""Is told how many bytes more have been packed."""


@dataclass(frozen=True, kw_only=True)
class ArchiveDescription:
    """What a node has to know of an archive; it lies in it."""

    prefix: str
    python: str
    torch: str
    torch_version: str
    links: dict[str, str]
    """Links that lead out of the environment, the base interpreter's for one: no archive that is safe to unpack holds
    them, so each node makes them itself."""

    @classmethod
    def load(cls, unpacked: Path) -> "ArchiveDescription":
        """Read it.

        Raises:
            TorchrelayError: it is not there, or another version's.
        """
        try:
            return cls(**json.loads((unpacked / DESCRIPTION).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise TorchrelayError(f"{unpacked} is no environment of ours ({error}): submit again") from error


def describe(environment: PythonEnvironment) -> ArchiveDescription:
    """What a node has to know of it."""
    return ArchiveDescription(
        prefix=str(environment.prefix),
        python=environment.python,
        torch=environment.torch,
        torch_version=environment.torch_version,
        links={member.name: str(member.target) for member in environment.members if member.leaves},
    )


def provide(
    environment: PythonEnvironment, runs_dir: Path, watch: Callable[[int], contextlib.AbstractContextManager[Progress]]
) -> Path:
    """The archive of an environment: the one that is there, or a new one.

    Args:
        environment: what to pack.
        runs_dir: the archives are in a directory of their own in it.
        watch: is told the bytes that are to be packed, if any are.

    Raises:
        TorchrelayError: it cannot be read or written, or changed meanwhile.
    """
    directory = _directory(runs_dir)
    _sweep(directory)
    try:
        archive = directory / f"{environment.fingerprint}.tar.zst"
        if not _use(archive):
            with watch(environment.size) as progress:
                _make(environment, archive, progress)
            _use(archive)
    except (OSError, tarfile.TarError) as error:
        raise TorchrelayError(
            f"the environment {environment.prefix} cannot be packed into {directory}: {error}; mend that, or leave "
            "--stage-env out"
        ) from error
    _expire(directory, runs_dir, archive)
    return archive


def _directory(runs_dir: Path) -> Path:
    """Where the archives are. Whoever can write there can run code as the user.

    Raises:
        UserError: somebody else could.
    """
    directory = runs_dir / DIRECTORY
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise UserError(f"--runs-dir {runs_dir} cannot be written: {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UserError(
            f"{directory} belongs to {user_name(status.st_uid)}, with mode {status.st_mode & 0o777:o}: environments "
            "that others can change are not run; use a --runs-dir of your own, or leave --stage-env out"
        )
    return directory


def _use(archive: Path) -> bool:
    """Whether it is there, and note that it is used: by the time of its last access.

    The time of its last change is a part of the name that the nodes' copies have.
    """
    try:
        os.utime(archive, ns=(time.time_ns(), archive.stat().st_mtime_ns))
    except FileNotFoundError:
        return False
    return True


def _make(environment: PythonEnvironment, archive: Path, progress: Progress) -> None:
    """Pack it under a name of our own, and give it its name unless somebody was faster: then that one counts."""
    pid = os.getpid()
    temporary = archive.with_name(f".{archive.name}.{_host()}.{pid}.{start_time(pid)}.tmp")
    try:
        with temporary.open("xb") as file:
            temporary.chmod(0o600)
            _pack(environment, file, progress)
            file.flush()
            os.fsync(file.fileno())
        if replace(environment).fingerprint != environment.fingerprint:
            raise TorchrelayError(f"{environment.prefix} was changed while it was packed: submit again")
        # The nodes read it from its first moment on: it must not be replaced by another one of the same content.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, archive)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(archive.parent)


def _pack(environment: PythonEnvironment, file: IO[bytes], progress: Progress) -> None:
    description = json.dumps(asdict(describe(environment))).encode()
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=threads)
    with (
        compressor.stream_writer(file, closefd=False) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", bufsize=_PIECE_BYTES) as tar,
    ):
        vars(tar)["copybufsize"] = _PIECE_BYTES  # its own are of 16 kB, and Python runs for each
        tar.addfile(
            _info(PackedFileEntry(DESCRIPTION, len(description), time.time_ns(), executable=False)),
            io.BytesIO(description),
        )
        for member in environment.members:
            if member.target is None:
                _add_file(tar, environment.prefix, member, progress)
            elif not member.leaves:
                tar.addfile(_info(member))


def _add_file(tar: tarfile.TarFile, prefix: Path, member: PackedFileEntry, progress: Progress) -> None:
    with (prefix / member.name).open("rb") as file:
        content = _Counted(file, progress)
        if member.name.startswith("bin/") and member.size < _LONGEST_SCRIPT:
            text = portable(content.read(), prefix)
            tar.addfile(_info(member._replace(size=len(text))), io.BytesIO(text))
        else:
            tar.addfile(_info(member), cast(IO[bytes], content))


class _Counted:
    """A file that tells how much of it has been read."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file, self._progress = file, progress

    def read(self, most: int = -1) -> bytes:
        """Like a file's."""
        piece = self._file.read(most)
        self._progress(len(piece))
        return piece


def _info(member: PackedFileEntry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(member.name)
    info.size, info.mode = member.size, 0o700 if member.executable else 0o600
    # Python compares whole seconds, to tell whether byte code is that of its source.
    info.mtime = member.modified_ns // 10**9
    if member.target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, member.target
    return info


def portable(script: bytes, prefix: Path) -> bytes:
    """A script that names its environment's interpreter as one that runs with the interpreter beside it. Pure.

    What is no such script stays as it is.
    """
    first, _, rest = script.partition(b"\n")
    if not first.startswith(b"#!" + os.fsencode(prefix / "bin" / "python")):
        return script
    return _PORTABLE.encode() + rest


def _sweep(directory: Path) -> None:
    """Remove what killed processes left half done."""
    for temporary in directory.glob(".*.tmp"):
        _, host, pid, started, _ = temporary.name.rsplit(".", 4)
        with contextlib.suppress(FileNotFoundError):
            silent_seconds = time.time() - temporary.stat().st_mtime
            if silent_seconds > _DEAD_SECONDS if host != _host() else not is_alive(pid, int(started)):
                temporary.unlink()


def _host() -> str:
    return os.uname().nodename.replace(".", "-")


def _expire(directory: Path, runs_dir: Path, current: Path) -> None:
    """Remove archives that were not used for a week, and that no run needs which could go on."""
    others = [archive for archive in directory.glob("*.tar.zst") if archive != current]
    old = [archive for archive in others if time.time() - archive.stat().st_atime > _KEEP_SECONDS]
    if not old:
        return
    needed = "".join(run.spec.read_text() for run in all_runs(runs_dir) if not run.final_result.exists())
    for archive in old:
        if archive.name not in needed:
            archive.unlink(missing_ok=True)


@contextmanager
def show(size: int) -> Iterator[Progress]:
    """A bar on stderr."""
    from rich.console import Console  # noqa: PLC0415 - a submission that packs nothing need not load it
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("packing the environment", total=size)
        yield lambda count: bar.advance(task, count)


@contextmanager
def silent(_size: int) -> Iterator[Progress]:
    """No word."""
    yield lambda _count: None
