"""Messages to real services on this machine: once, without secrets elsewhere, and never for long."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.events import attempt_ended, claimed, recorded_run, records_in, submitted, write_events
from support.message_server import SECRET, inbox, write_recipients

from hpc.run.events import ledger
from hpc.run.rundir import RunDir
from hpc.run.spec import Notification
from hpc.services.notification.delivery import is_due, run_delivery


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """One that has failed, and whose recipient is `hook`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    failed = claimed(), attempt_ended(None, "bad_input", step=0, detail="no such file")
    return recorded_run(tmp_path / "r", *failed, notification=Notification(notify=("hook",)))


def of_messages(run: RunDir) -> list[dict[str, str]]:
    return [event for event in records_in(run.events) if "notice" in event]


def test_of_many_processes_one_sends(run: RunDir, tmp_path: Path) -> None:
    with inbox() as found:
        write_recipients(tmp_path / "home", hook=found.address)
        command = [sys.executable, "-m", "hpc.services.notification.delivery", str(run.path)]
        several = [subprocess.Popen(command) for _ in range(4)]
        assert [one.wait() for one in several] == [0] * 4
        run_delivery(run)
    assert found.titles == ["Run r has failed"]
    assert "no such file" in found.texts[0]
    assert [event["event"] for event in of_messages(run)] == ["notifying", "notification_sent"]
    assert not is_due(run, Notification(notify=("hook",)), retry=True)


@pytest.mark.parametrize(("name", "reason"), [("hook", ""), ("other", "hook is not in")], ids=["nobody", "gone"])
def test_message_that_cannot_be_sent_is_recorded_without_its_address(
    run: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    write_recipients(tmp_path / "home", **{name: f"json://{SECRET}@127.0.0.1:1/{SECRET}"})
    run_delivery(run)
    [_, failed] = of_messages(run)
    assert (failed["event"], failed["notice"], failed["recipient"]) == ("notification_failed", "failed-001", "hook")
    assert failed["reason"]
    assert reason in failed["reason"]
    printed = capfd.readouterr()
    assert printed.out == "", "for --json of hpc supervise"
    assert "torchrelay: hook could not be notified" in printed.err
    assert SECRET not in str(ledger.read(run.events)) + printed.err


@pytest.mark.usefixtures("run")
def test_process_that_gets_no_answer_ends(tmp_path: Path) -> None:
    code = (
        "from hpc.services.notification.delivery import try_to_send; print(try_to_send('hook', 'title', 'text', 0.2))"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_recipients(tmp_path / "home", hook=f"json://127.0.0.1:{silent.getsockname()[1]}")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("no answer within 0.2 s\n", "")


def test_supervisor_tells_what_no_event_says(run: RunDir, tmp_path: Path) -> None:
    (run.events / "x.jsonl").unlink()
    write_events(run, submitted())
    with inbox() as found:
        write_recipients(tmp_path / "home", hook=found.address)
        for _ in range(2):
            run_delivery(run, retry=True, failure="given up: five jobs ended before they started")
    assert found.titles == ["Run r has failed"]
    assert found.texts[0].startswith("given up: five jobs")
