"""An interrupted run of the tests leaves nothing: its workers' machines end with it, and the next run removes files."""

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

from support.cluster import ROOT, commands, need, remove_left_directories, shared_directory
from support.waiting import wait_for

# In the machine: a user, a file in memory, and a process in a session of its own.
LEAVES_THINGS = """
import subprocess, sys, time
from pathlib import Path
subprocess.run(["useradd", "torchrelay-left"], check=True)
Path("/dev/shm", sys.argv[1]).touch()
subprocess.Popen(["setsid", "sh", "-c", "sleep 600", sys.argv[1]])
Path(sys.argv[2]).touch()
time.sleep(600)
"""
STARTS = "import subprocess, sys; subprocess.run(sys.argv[1:])"
HOLDS_A_DIRECTORY = "from support.cluster import shared_directory; print(shared_directory(), flush=True); input()"


def test_machine_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    need("unshare", "setpriv", "useradd")
    ready, name = tmp_path / "ready", f"torchrelay-left-{os.getpid()}"
    machine = [str(ROOT / "tests/own-machine"), "-c", LEAVES_THINGS, name, str(ready)]
    with subprocess.Popen([sys.executable, "-c", STARTS, *machine]) as starter:
        wait_for(ready.exists)
        starter.send_signal(signal.SIGKILL)
    wait_for(lambda: not [words for _, words in commands() if name.encode() in words])
    assert "torchrelay-left" not in {entry.pw_name for entry in pwd.getpwall()}
    assert not Path("/dev/shm", name).exists()


def test_next_run_removes_the_directories_of_a_killed_one() -> None:
    mine = shared_directory()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_DIRECTORY],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        assert left not in remove_left_directories()
        other.kill()
    assert left in remove_left_directories()
    assert not left.exists()
    assert mine.exists()
    mine.rmdir()
