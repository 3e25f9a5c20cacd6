"""Recipients of messages: names with addresses, in a file that only its user can read.

An address is a URL of apprise (https://appriseit.com/services/), which often holds a password. So addresses stay in the
file: a run, its events and every command line have only the names.
"""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from hpc.base.errors import UserError
from hpc.run.spec import Notification

if TYPE_CHECKING:
    from apprise import NotifyBase

ALL = "all"
"""The word that stands for all names in the file."""
# A name becomes a part of file names.
_NAME = re.compile(rf"(?!{ALL}$)[A-Za-z0-9][A-Za-z0-9_-]*")
_EXAMPLE = "a line such as  slack: slack://TOKEN_A/TOKEN_B/TOKEN_C  (https://appriseit.com/services/)"


def recipients_file() -> Path:
    """Return the path of the user's file of names and addresses, which need not exist."""
    return platformdirs.user_config_path() / "torchrelay-notify.yaml"


def read_recipients() -> dict[str, str]:
    """Return the addresses by name. Raises UserError if the file is missing or wrong, or others can read it."""
    import yaml  # noqa: PLC0415  # most runs have no recipients

    path = recipients_file()
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            found = yaml.safe_load(file)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: write {_EXAMPLE} into it, and type chmod 600 {path}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # The error's own text quotes the line, and so perhaps a password.
        raise UserError(f"{path} is not YAML ({type(error).__name__}): use {_EXAMPLE}") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(
            f"{path} is {stat.filemode(status.st_mode)} of user {status.st_uid}, so others may read its addresses and "
            f"their passwords: make it yours, and type chmod 600 {path}"
        )
    named = found.items() if isinstance(found, dict) else ()
    if not named or not all(_NAME.fullmatch(str(name)) and isinstance(address, str) for name, address in named):
        raise UserError(f"{path}: each name is of letters, digits, - and _, but not {ALL}, with an address: {_EXAMPLE}")
    return {str(name): address for name, address in found.items()}


def with_known_names(notification: Notification) -> Notification:
    """Check the names of --notify, and replace `all` by all names. Raises UserError as `choose_recipients` does."""
    return replace(notification, notify=tuple(choose_recipients(notification.notify)))


def choose_recipients(names: Sequence[str]) -> dict[str, str]:
    """Map each name to the recipient's service, such as Slack. `all` means all recipients.

    Raises UserError if the recipients file is wrong (`read_recipients`) or lacks a name, or if apprise does not support
    an address.
    """
    known = read_recipients() if names else {}
    wanted = list(dict.fromkeys(name for given in names for name in (known if given == ALL else (given,))))
    for name in wanted:
        if ":" in name:
            raise UserError(
                "a recipient is a name, not an address: everybody on this machine can read the command line. Write "
                f"NAME: ADDRESS into {recipients_file()}, and type the name"
            )
        if name not in known:
            choice = ", ".join(sorted(known))
            raise UserError(f"recipient {name!r} is not in {recipients_file()}: use {choice}, or {ALL}")
    return {name: str(service(name, known[name]).service_name) for name in wanted}


def service(name: str, address: str) -> "NotifyBase":
    """Return apprise's sender for an address. Raises UserError if apprise does not support the address."""
    from apprise import Apprise  # noqa: PLC0415 - takes half a second, which only a run with --notify should pay

    found = Apprise.instantiate(address, suppress_exceptions=True)
    if found is None:
        raise UserError(f"the address of {name} in {recipients_file()} is none of apprise's: use {_EXAMPLE}")
    return found
