"""`hpc notify`: send a test message to the recipients of `hpc submit --notify`. Runs on the login node."""

import functools
import socket
from dataclasses import dataclass
from typing import Annotated, Any

from hpc.base.flags import Flag
from hpc.base.text import visible
from hpc.commands import cli
from hpc.services.notification.delivery import try_to_send
from hpc.services.notification.recipients import ALL, choose_recipients, recipients_file

_TITLE = "A test message of Torchrelay"
_BODY = "hpc notify on {host} sent this: runs submitted with --notify {name} will send you a message when they end."


@dataclass(frozen=True, kw_only=True)
class NotifyOptions(cli.Common):
    """Send a test message to recipients of hpc submit --notify, or list the recipients if you give no names.

    Recipients are lines NAME: ADDRESS in ~/.config/torchrelay-notify.yaml, which only you may be able to read (chmod
    600), such as:
      slack: slack://TOKEN_A/TOKEN_B/TOKEN_C
      mail: mailto://USER:PASSWORD@smtp.example.org?to=me@example.org

    The page https://appriseit.com/services/ lists the addresses of all services.
    """

    names: Annotated[tuple[str, ...], Flag(metavar="[NAME ...]", is_positional=True)] = ()
    """Names of recipients; all: every recipient."""


def notify(options: NotifyOptions) -> int:
    """List the recipients, or send them messages. Returns 1 if a message could not be sent."""
    answers = list[dict[str, Any]]()
    for name, service in choose_recipients(options.names or (ALL,)).items():
        body = _BODY.format(host=socket.gethostname(), name=name)
        problem = try_to_send(name, _TITLE, body) if options.names else None
        sent = problem is None if options.names else None
        answers.append({"name": name, "service": service, "sent": sent, "problem": problem})
    if options.json:
        cli.print_json(answers)
    else:
        print(recipients_file())
        for answer in answers:
            outcome = {None: "", True: ": sent", False: f": not sent: {answer['problem']}"}[answer["sent"]]
            print(visible(f"  {answer['name']} ({answer['service']}){outcome}"))
    return int(any(answer["problem"] is not None for answer in answers))


main = functools.partial(cli.run, notify, NotifyOptions, "notify")
