"""`hpc status --watch` on a terminal: a real pseudo-terminal, and an emulator that knows what is on its screen."""

import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest
from support.cluster import ROOT
from support.events import claimed, recorded_run, submitted

from hpc.base.files import append_json_line
from hpc.commands.start import status
from hpc.run.rundir import RunDir

# The intervals are constants of the verb, which no flag changes: the test would last minutes.
WATCH = (
    "import sys; from hpc.commands.start import status; from hpc.status import run_view; "
    "run_view._QUEUE_SECONDS = run_view._AWAY_SECONDS = 0.1; "
    "status._WATCH_SECONDS = 0.1; status._WATCH_SHARE = 1; sys.exit(status.main(['--watch', *sys.argv[1:]]))"
)
PATIENCE_SECONDS = 60
LINES, COLUMNS = 24, 120


class Terminal:
    """A terminal that runs a command."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self._descriptor = pid, descriptor
        self.screen = pyte.HistoryScreen(COLUMNS, LINES, history=1000)
        self._stream = pyte.ByteStream(self.screen)

    def read(self, seconds: float = 0.1) -> bool:
        """Take in what the command has printed; False when nothing more will come."""
        if select.select([self._descriptor], [], [], seconds)[0]:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # so a Linux pseudo-terminal says that the other end is closed
                return False
            self._stream.feed(data)
            return bool(data)
        return True

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def wait(self, condition: Callable[[str], object]) -> str:
        """Wait until all that is asked of the screen holds at once: a new table may be half drawn over the old one."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition(self.text):
            assert time.monotonic() < deadline, self.text
            assert self.read(), self.text
        return self.text

    def interrupt(self) -> int:
        """Type Ctrl-C, and return the exit code."""
        os.write(self._descriptor, b"\x03")
        while self.read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def watching(*arguments: str) -> Iterator[Terminal]:
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        termios.tcsetwinsize(0, (LINES, COLUMNS))
        environment = {**os.environ, "TERM": "xterm-256color"}
        os.execve(sys.executable, [sys.executable, "-c", WATCH, *arguments], environment)
    try:
        yield Terminal(pid, descriptor)
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ChildProcessError, ProcessLookupError):
            pass  # it has ended and was waited for
        os.close(descriptor)


def make_run(runs: Path, name: str) -> RunDir:
    run = recorded_run(runs / name, submitted(1.0, job_id="1"), claimed(2.0, job_id="1"))
    run.train_metrics.parent.mkdir()
    run.script.write_text("#!/bin/sh\n")
    return run


def test_table_is_drawn_over_itself_until_ctrl_c(tmp_path: Path, squeue: Callable[[str], None]) -> None:
    run = make_run(tmp_path, "r")
    squeue(f"echo '1|RUNNING|None|gpu01|gpu01|0|N/A|N/A|{run.script}|'")
    with watching("--runs-dir", str(tmp_path)) as terminal:
        for step in (5, 6, 7):
            append_json_line(run.train_metrics, {"step": step, "epoch": 1})
            row = re.compile(rf"running .* {step}\b")
            terminal.wait(lambda text, row=row: row.search(text) and text.count("ETA") == 1)
        make_run(tmp_path, "later")
        terminal.wait(lambda text: "later" in text)
        assert terminal.interrupt() == 130
        assert "Traceback" not in terminal.text
        assert not terminal.screen.cursor.hidden
        assert not terminal.screen.history.top, "no line was scrolled off the screen"


def test_watch_survives_slurm_being_away(tmp_path: Path, squeue: Callable[[str], None]) -> None:
    run = make_run(tmp_path, "r")
    answers = f"echo '1|PENDING|Priority||n/a|0|N/A|N/A|{run.script}|'"
    squeue(answers)
    with watching("--runs-dir", str(tmp_path)) as terminal:
        terminal.wait(lambda text: "higher" in text)
        squeue("echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
        away = ("Slurm does not answer", "Unable to contact", "running")  # as the ledger says
        terminal.wait(lambda text: all(words in text for words in away))
        append_json_line(run.train_metrics, {"step": 77, "epoch": 1})
        terminal.wait(lambda text: " 77 " in text)
        squeue(answers)
        terminal.wait(lambda text: "higher" in text and "does not answer" not in text)
        assert not terminal.screen.history.top, "no line was scrolled off the screen"


def test_watch_needs_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["--watch", "--runs-dir", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--watch needs a terminal" in printed.err
