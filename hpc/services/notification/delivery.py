"""Sends the messages about a run, each message once to each recipient.

Agents and the supervisor run this module in a separate process, `python -m hpc.services.notification.delivery RUN_DIR`,
because a name server that does not answer may delay a message for minutes. Of several processes with the same message,
the one that creates the file `events/notice-KEY-RECIPIENT-1.jsonl` sends it. If sending fails, as on a compute node
without internet, the supervisor tries again, and creates the file with the next number.
"""

import argparse
import io
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from hpc.base.errors import UserError
from hpc.run.events.history import History
from hpc.run.events.kinds import NotificationFailed, NotificationSent, Notifying, OfMessage
from hpc.run.events.ledger import EventWriter, record_once
from hpc.run.rundir import RunDir
from hpc.run.spec import Notification, RunSpec
from hpc.services.notification.notices import Notice, notice_of
from hpc.services.notification.recipients import read_recipients, recipients_file, service

# Apprise waits 4 s for a connection and 4 s for an answer, but has no such limit for a name server.
_SEND_SECONDS = 12.0
# Time limit of the whole process: it starts, reads the run's events, and sends.
_PROCESS_SECONDS = 25.0
_RETRY_SECONDS, _MOST_TRIES = 60.0, 5
# Older events cause no message, even if somebody starts a supervisor only now.
_NEWS_SECONDS = 3600.0

Message = tuple[Notice, str, int]
"""A notice to send now, its recipient, and the number of this try to send it, from 1."""


def due_messages(
    notification: Notification, notice: Notice | None, history: History, now: float, *, retry: bool
) -> list[Message]:
    """Return the messages to send now; with `retry`, also those that other processes could not send. Pure."""
    if notice is None or now - notice.time >= _NEWS_SECONDS:
        return []
    return [
        (notice, name, number)
        for name in notification.notify
        if (number := _next_number(history, notice.key, name, now)) == 1 or (retry and number is not None)
    ]


def _next_number(history: History, key: str, recipient: str, now: float) -> int | None:
    """Return the number of the next try; None if the message was sent, was tried just now, or was tried too often."""
    own = [event for event in history.of(OfMessage) if (event.notice, event.recipient) == (key, recipient)]
    tries = sum(isinstance(event, Notifying) for event in own)
    if any(isinstance(event, NotificationSent) for event in own) or tries >= _MOST_TRIES:
        return None
    return None if own and now - own[-1].time < _RETRY_SECONDS else tries + 1


# --- in the process that wants messages sent ---


def is_due(run: RunDir, notification: Notification, *, retry: bool = False, failure: str | None = None) -> bool:
    """Return whether a message is to be sent now. Reads no file if the run has no --notify."""
    return bool(notification.notify and _due(run, notification, retry=retry, failure=failure))


def run_delivery(run: RunDir, *, retry: bool = False, failure: str | None = None) -> None:
    """Send the due messages in a separate process, which may take 25 s.

    Raises:
        OSError, subprocess.SubprocessError: the process did not start, failed (its stderr says why), or was too slow.
    """
    command = [sys.executable, "-P", "-m", __name__, str(run.path), *(["--retry"] if retry else [])]
    command += [] if failure is None else [f"--failure={failure}"]
    subprocess.run(command, check=True, timeout=_PROCESS_SECONDS, stdin=subprocess.DEVNULL)


# --- in the process that sends ---


def main(argv: Sequence[str] | None = None) -> int:
    """Send the due messages. Return 1 if a file of the run could not be read or written."""
    parser = argparse.ArgumentParser(description="Send what is to be told of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--retry", action="store_true", help="also what others could not send")
    parser.add_argument("--failure", help="why the run has failed, if its events do not say so")
    options = parser.parse_args(argv)
    run, senders, deadline = RunDir(options.run_dir), list[threading.Thread](), time.monotonic() + _SEND_SECONDS
    problem: OSError | None = None
    try:
        for message in _due(run, RunSpec.load(run).notification, retry=options.retry, failure=options.failure):
            if writer := _claim(run, message):
                senders.append(threading.Thread(target=_send_and_record, args=(message, writer, deadline)))
                senders[-1].start()
    except OSError as error:
        problem = error
    for thread in senders:
        thread.join()
    if problem:
        _tell(f"messages cannot be sent yet, because the run directory cannot be read or written: {problem}")
    return int(problem is not None)


def _due(run: RunDir, notification: Notification, *, retry: bool, failure: str | None) -> list[Message]:
    history = History.load(run)
    return due_messages(notification, notice_of(run.path, history, failure), history, time.time(), retry=retry)


def _claim(run: RunDir, message: Message) -> EventWriter | None:
    """Create the file of this try to send, and return its writer; None if another process has created it."""
    notice, name, number = message
    path = run.events / f"notice-{notice.key}-{name}-{number}.jsonl"
    return EventWriter(path) if record_once(path, Notifying(notice=notice.key, recipient=name)) else None


def _send_and_record(message: Message, writer: EventWriter, deadline: float) -> None:
    notice, name, _ = message
    problem = try_to_send(name, notice.title, notice.body, deadline - time.monotonic())
    sent = NotificationSent(notice=notice.key, recipient=name)
    if problem is not None:
        _tell(f"{name} could not be notified: {problem}")
    try:
        writer.append(
            sent if problem is None else NotificationFailed(notice=notice.key, recipient=name, reason=problem)
        )
    except OSError as error:
        _tell(f"{name} may get a message again, because this one could not be recorded: {error}")


def _tell(text: str) -> None:
    print(f"torchrelay: {text}", file=sys.stderr, flush=True)


def try_to_send(recipient: str, title: str, body: str, seconds: float = _SEND_SECONDS) -> str | None:
    """Send a message. Return None if it was sent, or else the reason, without secrets from the address."""
    # The thread is a daemon, so that this process can end while the thread waits for a name server.
    answers = list[str | None]()
    thread = threading.Thread(target=lambda: answers.append(_send(recipient, title, body)), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer within {seconds:.1f} s"


def _send(recipient: str, title: str, body: str) -> str | None:
    try:
        address = read_recipients().get(recipient)
        if address is None:
            return f"{recipient} is not in {recipients_file()} any more"
        target = service(recipient, address)
    except UserError as error:
        return str(error)
    # Apprise gives its reasons only to its logger, which the threads of other messages use, too.
    own, logger = threading.get_ident(), logging.getLogger("apprise")
    warnings = logging.StreamHandler(io.StringIO())
    warnings.setLevel(logging.WARNING)
    warnings.addFilter(lambda record: record.thread == own)
    logger.addHandler(warnings)
    logger.propagate = False
    try:
        if target.notify(title=title, body=body):
            return None
    except Exception as error:  # noqa: BLE001 - from modules of a hundred services; its text may quote the address
        return type(error).__name__
    finally:
        logger.removeHandler(warnings)
    return without_address("; ".join(warnings.stream.getvalue().splitlines()) or "refused", address)


def without_address(text: str, address: str) -> str:
    """Return a text without the parts of an address that may be a password: all parts except the scheme.

    Parts of up to three characters, such as `443`, stay: they also occur inside other words, which would be garbled.
    """
    written = [part for part in re.split(r"[/:@?&=,+\s]+", address.partition("://")[2]) if len(part) > 3]
    for part in sorted({*written, *map(unquote, written)}, key=len, reverse=True):
        text = text.replace(part, "***")
    return text


if __name__ == "__main__":
    sys.exit(main())
