"""Checks who owns files and directories, and who else can change them. Runs everywhere."""

import os
import pwd
import stat
from pathlib import Path

from hpc.base.errors import UserError
from hpc.run.rundir import RunDir


def check_is_own(run: RunDir) -> None:
    """Refuse to act on a run that another user made or can change, because its script and its code run as this user.

    Missing files are accepted, because nobody else can add them.

    Raises:
        UserError: a file of the run is another user's or a symbolic link, or others can write to it.
    """
    revised = run.path.glob("spec-*.json")
    for path in (run.path, run.script, run.spec, *revised, run.environment, run.events, run.code):
        if not os.path.lexists(path):
            continue
        status = path.lstat()
        if status.st_uid != os.getuid():
            raise UserError(
                f"run {run.name} is not yours alone: {path} belongs to {user_name(status.st_uid)}, and only the owner "
                "of a run can act on it"
            )
        if stat.S_ISLNK(status.st_mode):
            raise UserError(f"run {run.name} is not yours alone: {path} is a symbolic link; replace it by its target")
        if others_may_write(status):
            raise UserError(
                f"run {run.name} is not yours alone: {path} is {stat.filemode(status.st_mode)}, so others can change "
                f"what it runs as you; check its files, then type chmod -R go-w {run.path}"
            )


def other_owner(path: Path) -> str | None:
    """Return the name of a file's owner; None if the owner is this user, or if the file is gone."""
    try:
        owner = path.stat().st_uid
    except OSError:
        return None
    return None if owner == os.getuid() else user_name(owner)


def others_may_write(status: os.stat_result) -> bool:
    """Return whether users other than the owner can write to a file or directory."""
    # A group with the user's own number is the private group of the user, and has no other members.
    own_group = status.st_gid == os.getgid() == os.getuid()
    return bool(status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not own_group))


def who_may_rename(directory: Path) -> str | None:
    """Return a sentence about other users who can rename the contents of a directory; None if no other user can.

    User 0 and the owner of `/`, who may be another user inside a user namespace, do not count: they administer the
    machine. Of a symbolic link, only the owner counts, because the kernel ignores its mode.
    """
    status = directory.lstat()
    if status.st_uid not in {0, os.getuid(), Path("/").stat().st_uid}:
        return f"{directory} belongs to {user_name(status.st_uid)}, who could replace what is in it"
    if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX or not others_may_write(status):
        return None
    mode = stat.filemode(status.st_mode)
    return f"{directory} is {mode}, so other users may rename what is in it (a sticky bit, chmod +t, prevents that)"


def user_name(uid: int) -> str:
    """Return the name of a user, or `user UID` for a user without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
