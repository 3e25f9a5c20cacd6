"""Recipients of messages: names with addresses, in a file that only its user can read.

An address is a URL of apprise (https://appriseit.com/services/), which often holds a password. So addresses stay in the
file: a run, its events and every command line have only the names.
"""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from hpc.base.errors import UserError
from hpc.run.ownership import user_name
from hpc.run.spec import Notification

if TYPE_CHECKING:
    from apprise import NotifyBase

ALL = "all"
"""The word that stands for all names in the file."""
# A name becomes a part of file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_EXAMPLE = "a line such as  slack: slack://TOKEN_A/TOKEN_B/TOKEN_C"


def recipients_file() -> Path:
    """Return the path of the user's file of names and addresses, which need not exist."""
    return platformdirs.user_config_path() / "torchrelay-notify.yaml"


def read_recipients() -> dict[str, str]:
    """Return the addresses by name.

    Raises:
        UserError: the file is missing, others can read it, or its content is wrong.
    """
    import yaml  # noqa: PLC0415  # most runs have no recipients

    path = recipients_file()
    try:
        with path.open(encoding="utf-8") as file:
            _check_is_private(path, os.fstat(file.fileno()))
            found = yaml.safe_load(file)
    except FileNotFoundError as error:
        raise UserError(
            f"{path} does not exist: write {_EXAMPLE}  into it (https://appriseit.com/services/), and type chmod 600 "
            f"{path}"
        ) from error
    except yaml.YAMLError as error:
        # The error's own text quotes the line, and so perhaps a password.
        line = mark.line + 1 if (mark := getattr(error, "problem_mark", None)) else 1
        raise UserError(f"{path} is not valid YAML (line {line}): use {_EXAMPLE}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {type(error).__name__}") from error
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path} has no names with addresses: use {_EXAMPLE}")
    for name, address in found.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == ALL:
            raise UserError(f"{path} has a name that is not of letters, digits, - and _, or is {ALL}: choose another")
        if not isinstance(address, str):
            raise UserError(f"{path}: {name} has no address: use {_EXAMPLE}")
    return found


def _check_is_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.getuid():
        raise UserError(f"{path} belongs to {user_name(status.st_uid)}: replace it by a file of your own")
    if status.st_mode & 0o077:
        raise UserError(
            f"{path} is {stat.filemode(status.st_mode)}, so others may read its addresses and their passwords: type "
            f"chmod 600 {path}"
        )


def with_known_names(notification: Notification) -> Notification:
    """Check the names of --notify, and replace `all` by all names. Raises UserError as `choose_recipients` does."""
    return replace(notification, notify=tuple(choose_recipients(notification.notify)))


def choose_recipients(names: Iterable[str]) -> dict[str, str]:
    """Return each named recipient's service, such as Slack, by the recipient's name. `all` means all recipients.

    Raises:
        UserError: the file is wrong (`read_recipients`), it lacks a name, or apprise does not support an address.
    """
    names = list(names)
    known = read_recipients() if names else {}
    wanted = list(dict.fromkeys(each for name in names for each in (known if name == ALL else (name,))))
    for name in wanted:
        if name in known:
            continue
        if ":" in name:
            raise UserError(
                "a recipient is a name, not an address: everybody on this machine can read the command line. Write "
                f"NAME: ADDRESS into {recipients_file()}, and type the name"
            )
        raise UserError(f"recipient {name!r} is not in {recipients_file()}: use {', '.join(sorted(known))}, or {ALL}")
    return {name: str(service(name, known[name]).service_name) for name in wanted}


def service(name: str, address: str) -> "NotifyBase":
    """Return apprise's sender for an address. Raises UserError if apprise does not support the address."""
    from apprise import Apprise  # noqa: PLC0415 - takes half a second, which only a run with --notify should pay

    found = Apprise.instantiate(address, suppress_exceptions=True)
    if found is None:
        raise UserError(
            f"the address of {name} in {recipients_file()} is not an address that apprise supports: compare it "
            "with https://appriseit.com/services/"
        )
    return found
