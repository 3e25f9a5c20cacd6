"""`hpc logs`: what it prints, from where on, and how it follows logs that grow."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from support.cluster import ROOT
from support.events import attempt_ended, claimed, interruption, rank_failed, recorded_run, resources_of, write_events

from hpc.commands.start import logs
from hpc.run.events.ledger import Event
from hpc.run.rundir import RunDir
from hpc.status.log_reader import Tail

BLOCK = 2**17


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    attempts = (claimed(None, number, nodes=("gpu01", "gpu02")) for number in (1, 2))
    found = recorded_run(tmp_path / "r", *attempts, resources=resources_of(nodes="2", gpus_per_node="4"))
    for number in (1, 2):
        found.attempt_logs(number).mkdir(parents=True)
    return found


def printed(capsys: pytest.CaptureFixture[str], run: RunDir, *arguments: str) -> list[str]:
    assert logs.main([str(run.path), *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_agents_come_first_then_attempts_and_ranks_by_number(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("10_0_log.out", "9_1_log.out", "9_0_log.out"):
        (run.logs / name).write_text("agent\n")
    for attempt, rank in ((2, 0), (1, 100), (1, 11), (1, 2)):
        run.rank_log(attempt, rank).write_text("trained\n")
    agents = ["[job 9:0] agent", "[job 9:1] agent", "[job 10:0] agent"]
    ranks = ["[1:2] trained", "[1:11] trained", "[1:100] trained", "[2:0] trained"]
    assert printed(capsys, run) == [*agents, *ranks]
    assert printed(capsys, run, "--attempt=1", "--rank=100") == ["[1:100] trained"]
    assert printed(capsys, run, "--rank=0") == ["[2:0] trained"]


def test_ranks_are_merged_by_the_times_in_their_lines(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.rank_log(1, 0).write_text("head\n2026-11-21 09:00:01,500 a\n  more of a\n2026-11-21 09:00:03,000 c\n")
    run.rank_log(1, 1).write_text("[2026-11-21T09:00:02.25] b\nW1121 09:00:04.000001 7 torch/x.py:1] d\n")
    texts = [line.split("] ", 1)[1] for line in printed(capsys, run)]
    assert [text[-4:].strip() for text in texts] == ["head", "00 a", "of a", "25] b"[-4:], "00 c", "1] d"]


def test_json_is_one_document_also_without_logs(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.main([str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert logs.main([str(run.path), "--rank=8"]) == 0
    assert "has no such log yet" in capsys.readouterr().err
    noon = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))
    texts = {
        'a "b"': None,
        "2026-11-21 12:00:00,5 c": noon + 0.5,
        "2026-13-21 12:00:00 d": None,
        "I1121 12:00:00 e": None,
    }
    run.rank_log(1, 0).write_text("\n".join(texts))
    assert logs.main([str(run.path), "--json"]) == 0
    lines = [{"schema": 1, "attempt": 1, "rank": 0, "time": moment, "line": text} for text, moment in texts.items()]
    assert json.loads(capsys.readouterr().out) == lines


HANGING = """
import faulthandler, os, sys, threading

faulthandler.enable(all_threads=True)
threading.Thread(target=threading.Event().wait, daemon=True).start()

def wait_for_others():
    os.abort()

def {step}():
    wait_for_others()

{step}()
"""


def test_equal_stacks_of_a_hang_are_printed_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def hang(rank: int, step: str) -> None:
        with run.rank_log(1, rank).open("ab") as log:
            log.write(b"training\n")
            log.flush()
            command = [sys.executable, "-c", HANGING.format(step=step)]
            assert subprocess.run(command, stderr=log, check=False).returncode == -signal.SIGABRT

    for rank, step in enumerate(("load", "load", "load", "load", "backward")):
        hang(rank, step)
    for rank, step in enumerate(("backward", "backward", "save", "backward")):
        hang(rank, step)
    add(run.rank_log(1, 0), "trains again\n")
    add(run.rank_log(1, 4), "stopped\n")
    add(run.rank_log(2, 0), "no stack in this attempt\n")
    write_events(run, interruption(None, "hang", attempt=1))
    frames = [
        "attempt 1, ranks 0-1, 3 (most recent call first):",
        '  File "<string>", line 8 in wait_for_others', '  File "<string>", line 11 in backward',
        '  File "<string>", line 13 in <module>',
        "attempt 1, rank 2 (most recent call first):",
        '  File "<string>", line 8 in wait_for_others', '  File "<string>", line 11 in save',
        '  File "<string>", line 13 in <module>',
        "attempt 1, rank 4: no stack",
    ]  # fmt: skip
    assert printed(capsys, run, "--stacks") == frames
    assert logs.main([str(run.path), "--stacks", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(group["ranks"], len(group["stack"] or ())) for group in found] == [([0, 1, 3], 3), ([2], 3), ([4], 0)]
    assert logs.main([str(run.path), "--stacks", "--attempt=2"]) == 0
    assert "no rank of run r has printed a stack" in capsys.readouterr().err
    assert logs.main([str(run.path), "--stacks", "--rank=0"]) == 2
    assert "omit --follow and --rank" in capsys.readouterr().err


def test_control_characters_are_shown_as_text(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2Jloss \x9b1A"
    run.rank_log(1, 0).write_text(f"{hostile}\n")
    (run.logs / "9_0_log.out").write_text(f"{hostile}\n")
    shown = r"\x1b]0;owned\x07\x1b[2Jloss \x9b1A"
    assert printed(capsys, run) == [f"[job 9:0] {shown}", f"[1:0] {shown}"]
    assert logs.main([str(run.path), "--rank=0", "--json"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert json.loads(out)[0]["line"] == hostile


def test_line_is_shown_as_a_terminal_would(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.rank_log(1, 0).write_bytes(b" 10%\r 50%\r100%\nwindows\r\n\xff\xfe\nno line break")
    assert printed(capsys, run) == ["[1:0] 100%", "[1:0] windows", "[1:0] \ufffd\ufffd", "[1:0] no line break"]


def fail(run: RunDir, *, detail: str = "KeyError: 'x'", named: int | None = 5) -> None:
    """Rank 3 fails and is restarted; then rank 5 fails, rank 3 because of it, and the run has ended."""
    peer = "RuntimeError: Connection closed by peer [127.0.0.1]:1"
    same = {"attempt": 2, "step": 0, "node": "gpu02", "signature": "1: KeyError"}

    def failed(rank: int, round_: int, at: float, message: str) -> Event:
        return rank_failed(None, rank, attempt=2, round_=round_, node="gpu02", failed_at=at, detail=message)

    first = failed(3, 1, 10.0, peer), interruption(rank=3, failed_at=10.0, **same)
    second = failed(3, 2, 19.5, peer), failed(5, 2, 20.0, detail)
    write_events(run, *first, *second, attempt_ended(None, "crashed", rank=named, failed_at=20.0, **same))


@pytest.mark.parametrize("named", [5, None])
def test_failed_run_starts_before_its_first_error(
    named: int | None, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    fail(run, named=named)
    for rank in (3, 5):
        run.rank_log(2, rank).write_text("".join(f"step {i}\n" for i in range(500)) + "KeyError: 'x'\nthe end\n")
    assert logs.main([str(run.path)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"[2:5] step {i}" for i in range(460, 500)] + ["[2:5] KeyError: 'x'", "[2:5] the end"]
    assert "attempt 2 failed; first failure: rank 5 on gpu02 (crashed)" in err
    assert "--all shows everything" in err
    assert len(printed(capsys, run, "--all")) == 2 * 502
    assert len(printed(capsys, run, "--rank=3")) == 502
    assert logs.main([str(run.path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2 * 502


def test_failure_without_a_rank_and_one_that_an_attempt_follows_hide_nothing(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.logs / "7_0_log.out").write_text("torchrelay: no space\n")
    run.rank_log(2, 0).write_text("a\n")
    write_events(run, attempt_ended(None, "no_space", attempt=2, step=0))
    assert printed(capsys, run) == ["[job 7:0] torchrelay: no space", "[2:0] a"]
    write_events(run, rank_failed(attempt=2, detail="a"), attempt_ended(None, "crashed", attempt=2, step=9, rank=0))
    run.rank_log(2, 1).write_text("b\n")
    assert printed(capsys, run) == ["[job 7:0] torchrelay: no space", "[2:0] a", "[2:1] b"]


def test_of_a_huge_log_only_the_end_is_read(run: RunDir) -> None:
    """A hole of 8 GB, in a process that may not have a tenth of that."""
    with run.rank_log(1, 0).open("wb") as file:
        file.truncate(2**33)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"".join(b"step %06d\n" % i for i in range(200_000)))
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29)); "
        "from hpc.commands.start.logs import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run.path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "[1:0] step 199999"
    assert lines == [f"[1:0] step {i:06d}" for i in range(200_000 - len(lines), 200_000)]
    assert 2**20 <= len(lines) * len("step 000000\n") < 2**20 + 100
    assert "only the ends of long logs are shown: --all shows everything" in done.stderr


def test_tail_reads_what_is_new_in_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log)
    assert list(tail.lines()) == [], "it is not there yet"
    with log.open("a", buffering=1) as file:
        file.write("one\ntw")
        assert list(tail.lines()) == ["one"]
        file.write("o\n\nthr")
        assert list(tail.lines()) == ["two", ""]
        assert list(tail.lines()) == []
        assert list(tail.lines(ended=True)) == ["thr"]
    log.write_bytes(b"x" * (5 * BLOCK) + b"\nlast\n")
    lines = list(Tail(log).lines())
    assert ("".join(lines), lines[-1]) == ("x" * (5 * BLOCK) + "last", "last"), "an endless line is cut"
    assert max(map(len, lines)) <= 2 * BLOCK


def test_tail_begins_anew_with_a_log_that_was_cut_or_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a long first line\nhalf")
    tail = Tail(log)
    assert list(tail.lines()) == ["a long first line"]
    log.write_text("cut\n")
    assert list(tail.lines()) == ["cut"]
    (tmp_path / "new").write_text("replaced by more\n")
    (tmp_path / "new").replace(log)
    assert list(tail.lines()) == ["replaced by more"]
    log.unlink()
    assert list(tail.lines()) == []
    log.write_text("again\n")
    assert list(tail.lines()) == ["again"]


@pytest.fixture
def following(run: RunDir) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-u", "-m", "hpc.logs", "--follow", str(run.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        yield child
        child.kill()


def line_of(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().rstrip("\n")


def add(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def test_following_goes_on_over_attempts_to_the_last_line(run: RunDir, following: "subprocess.Popen[str]") -> None:
    add(run.rank_log(1, 0), "one\n")
    assert line_of(following) == "[1:0] one"
    add(run.rank_log(1, 0), "two\n")
    assert line_of(following) == "[1:0] two"
    write_events(run, attempt_ended(None, "preempted"))
    add(run.rank_log(2, 3), "three\n")
    assert line_of(following) == "[2:3] three"
    run.rank_log(2, 3).unlink()
    add(run.rank_log(1, 0), "late, and killed in the middle of a li")
    run.attempt_logs(3).mkdir()
    add(run.rank_log(3, 0), "four\nand no line break")
    assert {line_of(following), line_of(following)} == {"[1:0] late, and killed in the middle of a li", "[3:0] four"}
    write_events(run, attempt_ended(attempt=2, step=9))
    out, err = following.communicate(timeout=60)
    assert (following.returncode, out, err) == (0, "[3:0] and no line break\n", "")


def test_ctrl_c_ends_the_following_silently(run: RunDir, following: "subprocess.Popen[str]") -> None:
    add(run.rank_log(1, 0), "one\n")
    assert line_of(following) == "[1:0] one"
    following.send_signal(signal.SIGINT)
    out, err = following.communicate(timeout=60)
    assert (following.returncode, out, err) == (130, "", "")


def test_closed_pipe_ends_it_silently(run: RunDir) -> None:
    run.rank_log(1, 0).write_text("line\n" * 100_000)
    command = [sys.executable, "-m", "hpc.logs", "--all", str(run.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        streams: list[IO[str]] = [stream for stream in (child.stdout, child.stderr) if stream]
        assert streams[0].readline() == "[1:0] line\n"
        streams[0].close()
        assert streams[1].read() == ""
    assert child.returncode == 0
