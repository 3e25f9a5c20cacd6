"""`hpc notify`: recipients are tried before a run depends on them."""

import json
import subprocess
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message as MessageHandler
from support.cluster import hpc
from support.message_server import inbox, write_recipients


class Mailbox(MessageHandler):
    """Keeps the mail."""

    def __init__(self) -> None:
        super().__init__()
        self.subjects: list[str] = []

    def handle_message(self, message: object) -> None:
        self.subjects.append(message_from_bytes(bytes(message))["Subject"])  # type: ignore[call-overload]


@pytest.fixture
def mail_server() -> Iterator[Controller]:
    """A real SMTP server on a port of its own."""
    with inbox() as free:
        port = int(free.address.rpartition(":")[2].partition("/")[0])
    controller = Controller(Mailbox(), hostname="127.0.0.1", port=port)
    controller.start()
    yield controller
    controller.stop()


def test_test_messages_arrive_by_web_and_mail(tmp_path: Path, mail_server: Controller) -> None:
    mail = f"mailto://127.0.0.1:{mail_server.port}?from=hpc@example.org&to=me@example.org&mode=insecure"
    with inbox() as found:
        write_recipients(tmp_path, hook=found.address, mail=mail)
        names = hpc("notify", "--json", XDG_CONFIG_HOME=str(tmp_path))
        assert not found.titles, "without a name it sends nothing"
        done = hpc("notify", "all", XDG_CONFIG_HOME=str(tmp_path))
    of_hook = {"schema": 1, "name": "hook", "service": "JSON", "sent": None, "problem": None}
    assert json.loads(names.stdout)[0] == of_hook
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["  hook (JSON): sent", "  mail (E-Mail): sent"]
    assert found.titles == mail_server.handler.subjects == ["A test message of Torchrelay"]


def test_message_that_does_not_arrive_is_a_failure(tmp_path: Path) -> None:
    write_recipients(tmp_path, hook="json://127.0.0.1:1/hunter2")
    done = hpc("notify", "hook", XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "  hook (JSON): not sent: " in done.stdout
    assert "hunter2" not in done.stdout + done.stderr


def test_submission_names_the_recipients_before_the_queue(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    write_recipients(tmp_path, hook="json://127.0.0.1:1/hunter2")

    def submit(notify: str) -> "subprocess.CompletedProcess[str]":
        local = ("--cluster=local", "--gpus-per-node=1", "--dry-run", "--in-place", f"--notify={notify}", "--", "a.py")
        return hpc("submit", *local, cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))

    done = submit("all")
    assert (done.returncode, "hpc submit: notifies hook (JSON)" in done.stderr) == (0, True), done.stderr
    refused = submit("slak")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "use hook, or all" in refused.stderr
    assert not (tmp_path / "runs").exists()
