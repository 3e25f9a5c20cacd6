"""The archive of a Python environment: packed once on the login node, fetched and unpacked by compute nodes.

A shared file system delivers one large file in seconds. For the 30,000 small files of an environment it needs minutes,
at every start of every rank.
"""

import contextlib
import io
import json
import os
import sys
import tarfile
import time
import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import fsync_directory, remove_abandoned
from hpc.commands import cli
from hpc.run.events.resumption import current_spec
from hpc.run.ownership import user_name
from hpc.sources.python_environment import DESCRIPTION, EnvironmentDescription, PackedFileEntry, PythonEnvironment
from hpc.sources.zstd import CompressionParameter, ZstdFile

DIRECTORY = ".environments"
_BUFFER_BYTES = 2**20
_KEEP_SECONDS = 7 * 86400
# A packing process writes all the time. If its file is older than this, the process is dead.
_ABANDONED_SECONDS = 3600


def find_or_make(environment: PythonEnvironment, runs_dir: Path) -> Path:
    """Return the archive of an environment in the runs directory. If there is none, pack the environment.

    Archives that were unused for a week and that no unfinished run needs are deleted.

    Raises:
        UserError: the directory of the archives cannot be made, or another user can write to it.
        TorchrelayError: the environment cannot be read, or the archive cannot be written, or the environment changed
            while it was packed.
    """
    directory = runs_dir / DIRECTORY
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise UserError(f"--runs-dir {runs_dir} cannot be written: {error}") from error
    # A user who can write to the archives can run code as this user.
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UserError(
            f"{directory} belongs to {user_name(status.st_uid)} and has mode {status.st_mode & 0o777:o}, so others can "
            "change the environments in it: use a --runs-dir of your own, or omit --stage-env"
        )
    remove_abandoned(directory, ".*.tmp", lambda path: time.time() - path.stat().st_mtime > _ABANDONED_SECONDS)
    try:
        archive = directory / f"{environment.fingerprint}.tar.zst"
        if not _mark_used(archive):
            size = sum(member.size for member in environment.members)
            print(f"hpc submit: packing {environment.prefix} ({size / 1e9:.1f} GB)", file=sys.stderr)
            _make(environment, archive)
            _mark_used(archive)
    except (OSError, tarfile.TarError) as error:
        raise TorchrelayError(
            f"the environment {environment.prefix} cannot be packed into {directory}: {error}; correct that, or omit "
            "--stage-env"
        ) from error
    _delete_unused(archive, runs_dir)
    return archive


def _mark_used(archive: Path) -> bool:
    """Record a use of the archive in its access time. Returns whether it exists.

    The modification time stays the same: it is part of the name of the nodes' copies.
    """
    try:
        os.utime(archive, ns=(time.time_ns(), archive.stat().st_mtime_ns))
    except FileNotFoundError:
        return False
    return True


def _make(environment: PythonEnvironment, archive: Path) -> None:
    """Pack under a temporary name, then link to the final name. If another process was faster, its archive stays."""
    temporary = archive.with_name(f".{archive.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            temporary.chmod(0o600)
            _pack(environment, file)
            file.flush()
            os.fsync(file.fileno())
        if replace(environment).fingerprint != environment.fingerprint:
            raise TorchrelayError(f"{environment.prefix} was changed while it was packed: submit again")
        # Nodes read the archive as soon as it exists: another one with the same content must not replace it.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, archive)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(archive.parent)


def _pack(environment: PythonEnvironment, file: IO[bytes]) -> None:
    links = {member.name: member.target for member in environment.members if member.target and member.target[0] == "/"}
    description = json.dumps(asdict(EnvironmentDescription(python=environment.python, links=links))).encode()
    # Level 1 takes three quarters of the time of level 3, for 8% more bytes. The login node is shared by all users.
    threads = min(len(os.sched_getaffinity(0)), 8)
    options: dict[int, int] = {CompressionParameter.compression_level: 1, CompressionParameter.nb_workers: threads}
    with (
        ZstdFile(file, "wb", options=options) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", bufsize=_BUFFER_BYTES) as tar,
    ):
        vars(tar)["copybufsize"] = _BUFFER_BYTES  # tarfile's default would cost a Python call for each 16 kB
        entry = PackedFileEntry(DESCRIPTION, len(description), time.time_ns(), executable=False)
        tar.addfile(_tar_info(entry), io.BytesIO(description))
        for member in environment.members:
            if member.name in links:
                continue
            if member.target is not None:
                tar.addfile(_tar_info(member))
                continue
            with (environment.prefix / member.name).open("rb") as content:
                tar.addfile(_tar_info(member), content)


def _tar_info(member: PackedFileEntry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(member.name)
    info.size, info.mode = member.size, 0o700 if member.executable else 0o600
    # Byte code records its source's time in whole seconds, and Python compares that with the source file.
    info.mtime = member.modified_ns // 10**9
    if member.target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, member.target
    return info


def _delete_unused(current: Path, runs_dir: Path) -> None:
    """Delete the other archives that were unused for a week and that no unfinished run needs."""
    others = [archive for archive in current.parent.glob("*.tar.zst") if archive != current]
    old = [archive for archive in others if time.time() - archive.stat().st_atime > _KEEP_SECONDS]
    if not old:
        return
    needed = "".join(current_spec(run).read_text() for run in cli.all_runs(runs_dir) if not run.final_result.exists())
    for archive in old:
        if archive.name not in needed:
            archive.unlink(missing_ok=True)
