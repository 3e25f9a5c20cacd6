"""`hpc notify`: recipients are tried before a run depends on them."""

import json
import subprocess
from pathlib import Path

from support.cluster import hpc
from support.message_server import inbox, write_recipients


def test_test_message_arrives(tmp_path: Path) -> None:
    with inbox() as found:
        write_recipients(tmp_path, hook=found.address)
        names = hpc("notify", "--json", XDG_CONFIG_HOME=str(tmp_path))
        assert not found.titles, "without a name it sends nothing"
        done = hpc("notify", "all", XDG_CONFIG_HOME=str(tmp_path))
    of_hook = {"schema": 1, "name": "hook", "service": "JSON", "sent": None, "problem": None}
    assert json.loads(names.stdout)[0] == of_hook
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["  hook (JSON): sent"]
    assert found.titles == ["A test message of Torchrelay"]


def test_message_that_does_not_arrive_is_a_failure(tmp_path: Path) -> None:
    write_recipients(tmp_path, hook="json://127.0.0.1:1/hunter2")
    done = hpc("notify", "hook", XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "  hook (JSON): not sent: " in done.stdout
    assert "hunter2" not in done.stdout + done.stderr


def test_submission_checks_the_recipients_before_the_queue(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    write_recipients(tmp_path, hook="json://127.0.0.1:1/hunter2")

    def submit(notify: str) -> "subprocess.CompletedProcess[str]":
        local = ("--cluster=local", "--gpus-per-node=1", "--dry-run", "--in-place", f"--notify={notify}", "--", "a.py")
        return hpc("submit", *local, cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))

    done = submit("all")
    assert done.returncode == 0, done.stderr
    refused = submit("slak")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "use hook, or all" in refused.stderr
    assert not (tmp_path / "runs").exists()
