"""States from squeue and from the run directory: a real executable prints what Slurm printed, or fails like it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.cluster import need
from support.events import attempt_ended, cancelled, claimed, event, recorded_run, staged, submitted, write_events

from hpc.base.files import append_json_line
from hpc.commands.cluster import supervise
from hpc.commands.start import status
from hpc.run.events.kinds import Event
from hpc.run.rundir import RunDir
from hpc.slurm import client
from hpc.slurm.alive import jobs_by_run
from hpc.slurm.squeue import parse_jobs
from hpc.status.cells import wait_reason
from hpc.status.printing import wait_for_end
from hpc.status.run_view import StatusCache

Capture = pytest.CaptureFixture[str]
Squeue = Callable[[str], None]
CLAIMED, PREEMPTED, CANCELLED = claimed(1.0), attempt_ended(2.0, "preempted"), cancelled(2.0)
REFUSED, COMPLETED = attempt_ended(2.0, "bad_input"), attempt_ended(2.0, "completed")
ALIVE = "7|{state}|{reason}|gpu01|gpu01|0|N/A|{start}|{script}|"


def printing(tmp_path: Path, *lines: str) -> str:
    """The text of a squeue that prints these lines."""
    (tmp_path / "queue").write_text("".join(line + "\n" for line in lines))
    return f"exec cat {tmp_path}/queue"


def make_run(tmp_path: Path, *events: Event, name: str = "r") -> RunDir:
    run = recorded_run(tmp_path / "runs" / name, submitted(0.0), *events)
    run.train_metrics.parent.mkdir()
    run.script.write_text("#!/bin/sh\n")
    return run


def alive(run: RunDir, state: str = "PENDING", reason: str = "None", start: str = "N/A") -> str:
    return ALIVE.format(state=state, reason=reason, start=start, script=run.script)


FAILS = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([CLAIMED, PREEMPTED], "pending"),
        ([CLAIMED, REFUSED], "failed"),
        ([CLAIMED, COMPLETED], "completed"),
        ([CLAIMED, CANCELLED], "cancelled"),
    ],
)
def test_without_slurm_the_state_comes_from_the_ledger(
    events: list[Event], state: str, tmp_path: Path, squeue: Squeue
) -> None:
    run = make_run(tmp_path, *events)
    squeue(FAILS)
    assert StatusCache().summary(run).state == state


def test_squeue_that_hangs_is_a_slurm_that_is_away(
    tmp_path: Path, squeue: Squeue, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cache = make_run(tmp_path, CLAIMED), StatusCache()
    squeue("exec sleep 60")
    monkeypatch.setattr(client, "_TIMEOUT_SECONDS", 0.2)
    assert cache.summary(run).state == "running"
    assert str(cache.problem).startswith("Slurm does not answer")


def test_slurm_that_is_away_is_mentioned_once_on_stderr(tmp_path: Path, squeue: Squeue, capsys: Capture) -> None:
    make_run(tmp_path, CLAIMED)
    make_run(tmp_path, name="s")
    squeue(FAILS)
    assert status.main(["--runs-dir", str(tmp_path / "runs"), "--json"]) == 0
    printed = capsys.readouterr()
    assert [row["state"] for row in json.loads(printed.out)] == ["running", "pending"]
    assert printed.err.count("\n") == 1
    assert "Unable to contact slurm controller" in printed.err


@pytest.mark.parametrize(
    ("word", "state"),
    [("RUNNING", "running"), ("PENDING", "pending"), ("COMPLETING", "pending"), ("CONFIGURING", "pending"),
     ("NEW_WORD", "running"), ("", "running")],
)  # fmt: skip
def test_state_of_a_job_that_slurm_holds(word: str, state: str, tmp_path: Path, squeue: Squeue) -> None:
    run = make_run(tmp_path, CLAIMED)
    squeue(printing(tmp_path, alive(run, word)))
    assert StatusCache().summary(run).state == state


SCANCELLED = "7|CANCELLED|None|||0|N/A|N/A|{script}|"
GONE = "its job is gone: continue it with hpc supervise --once, or hpc resume"
NEVER = "its job is gone, and its agents had not started: see the job's log in logs/, then type hpc resume"


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        (([CLAIMED], "", 5), ("pending", "its job has just ended")),
        (([CLAIMED], "", 120), ("pending", GONE)),
        (([CLAIMED], "", 900), ("failed", GONE)),
        (([CLAIMED, REFUSED], "", 120), ("failed", "given up: bad_input")),
        (([CLAIMED, COMPLETED], "", 120), ("completed", None)),
        (([], "", 120), ("failed", NEVER)),
        (([], SCANCELLED, 120), ("cancelled", "its job was cancelled with scancel")),
        (([CLAIMED, PREEMPTED], SCANCELLED, 120), ("cancelled", "its job was cancelled with scancel")),
        (([CLAIMED, PREEMPTED, event("scancelled", 3.0, attempt=1, job_id="7")], "", 120),
         ("cancelled", "its job was cancelled with scancel")),
    ],
)  # fmt: skip
def test_run_without_a_job_has_the_supervisors_reason(
    known: tuple[list[Event], str, float],
    shown: tuple[str, str | None],
    tmp_path: Path,
    squeue: Squeue,
    capsys: Capture,
) -> None:
    (events, listed, seconds_ago), (state, reason) = known, shown
    began = time.time() - seconds_ago
    run = make_run(tmp_path, *(replace(event, time=began + event.time - 1.0) for event in events))
    squeue(printing(tmp_path, listed.format(script=run.script)))
    row = StatusCache().summary(run)
    assert (row.state, row.reason) == (state, reason)
    supervise.main(["--dry-run", "--json", "--runs-dir", str(tmp_path / "runs")])
    [line] = json.loads(capsys.readouterr().out)
    assert reason is None or reason.startswith(line["reason"])


def test_reason_why_a_run_has_no_job_is_printed(tmp_path: Path, squeue: Squeue, capsys: Capture) -> None:
    run = make_run(tmp_path)
    squeue("exit 0")
    assert status.main([str(run.path)]) == 0
    assert NEVER in " ".join(capsys.readouterr().out.split())
    assert wait_for_end(run, None) == 1
    assert f"failed: {NEVER}" in capsys.readouterr().err


def test_pending_run_has_its_reason_and_start(tmp_path: Path, squeue: Squeue, capsys: Capture) -> None:
    soon = datetime.fromtimestamp(time.time() + 1800).astimezone()
    run = make_run(tmp_path)
    start = f"{soon.astimezone(UTC):%Y-%m-%dT%H:%M:%S}"
    squeue(printing(tmp_path, alive(run, reason="QOSMaxJobsPerUserLimit", start=start)))
    row = StatusCache().summary(run)
    assert (row.reason, row.starts_at) == ("QOSMaxJobsPerUserLimit", int(soon.timestamp()))
    assert status.main([str(run.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "you have reached a limit of the QOS" in shown
    assert f"may start {soon:%H:%M}" in shown


def test_requeued_run_shows_until_when_slurm_holds_it(tmp_path: Path, squeue: Squeue) -> None:
    soon = datetime.fromtimestamp(time.time() + 100).astimezone()
    run = make_run(tmp_path)
    squeue(printing(tmp_path, f"7|PENDING|BeginTime||n/a|1|{soon.astimezone(UTC):%Y-%m-%dT%H:%M:%S}|N/A|{run.script}|"))
    found = wait_reason(StatusCache().summary(run))
    assert found == f"held by Slurm until {soon:%H:%M} (--begin, or a requeue delay, which hpc supervise ends)"


def test_jobs_are_found_by_any_name_of_the_script(tmp_path: Path) -> None:
    run, other = make_run(tmp_path), make_run(tmp_path, name="other")
    (tmp_path / "link").symlink_to(run.path)
    lines = [
        alive(run).replace("7|", "1|", 1),
        alive(RunDir(tmp_path / "link"), "RUNNING").replace("7|", "2|", 1),
        "3|RUNNING|None|||0|N/A|N/A|/gone/submit.sbatch|",
    ]
    found = jobs_by_run([run, other], parse_jobs("\n".join(lines)))
    assert [job.job_id for job in found[run.path]] == ["2", "1"], "the one that runs comes first"
    assert found[other.path] == []


def remove_events(run: RunDir) -> None:
    (run.events / "x.jsonl").unlink()
    run.events.rmdir()


CLOSED: dict[str, Callable[[RunDir], object]] = {
    "a directory in place of a file": lambda run: run.train_metrics.mkdir(),
    "a file in place of the events": lambda run: (remove_events(run), run.events.write_text("")),
}  # fmt: skip


@pytest.mark.parametrize("how", CLOSED)
def test_damaged_run_has_slurms_state_and_hides_no_other(how: str, tmp_path: Path, squeue: Squeue) -> None:
    run, sound = make_run(tmp_path, CLAIMED), make_run(tmp_path, CLAIMED, name="s")
    CLOSED[how](run)
    squeue(printing(tmp_path, alive(run, "RUNNING"), alive(sound, "RUNNING").replace("7|", "8|", 1)))
    damaged, other = StatusCache().summaries([run, sound])
    assert (damaged.state, damaged.job_id, damaged.attempt) == ("running", "7", None)
    assert damaged.damaged[0].startswith(f"the records in {run.path} cannot be read: ")
    assert (other.attempt, other.warnings) == (1, [])


def test_unreadable_run_hides_no_other(shared: Path) -> None:
    """As an ordinary user: root reads everything."""
    need()
    run, sound = make_run(shared, CLAIMED), make_run(shared, CLAIMED, name="s")
    run.script.unlink(), sound.script.unlink()
    run.events.chmod(0)
    (shared / "runs" / "theirs").mkdir(mode=0)
    program = (
        "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "from hpc.commands.start.status import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--json", "--runs-dir", str(shared / "runs")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    damaged, other = json.loads(done.stdout)  # and nothing of a directory that others may not even look into
    [owner], [problem] = damaged["warnings"], damaged["damaged"]
    assert owner.startswith("it belongs to root")
    assert "Permission denied" in problem
    assert other["attempt"] == 1


def test_run_that_is_deleted_while_it_is_read_is_left_out(tmp_path: Path) -> None:
    run, sound = make_run(tmp_path, CLAIMED), make_run(tmp_path, CLAIMED, name="s")
    remove_events(run)
    run.spec.unlink()
    assert [row.run for row in StatusCache().summaries([run, sound])] == ["s"]


def test_later_summary_has_what_changed(tmp_path: Path, squeue: Squeue) -> None:
    squeue(FAILS)
    run, failed = make_run(tmp_path, CLAIMED), make_run(tmp_path, name="failed")
    cache = StatusCache()
    assert [row.step for row in cache.summaries([run, failed])] == [None, None]
    append_json_line(run.train_metrics, {"step": 6})
    write_events(failed, cancelled(9.0), file="cancel.jsonl")
    assert [(row.step, row.state) for row in cache.summaries([run, failed])] == [(6, "running"), (None, "cancelled")]
    write_events(failed, claimed(10.0), file="by-hand.jsonl")
    assert [row.attempt for row in cache.summaries([run, failed])] == [1, 1]


def staging(node: str, done: int, left: float) -> Event:
    return event(
        "staging", 2.0, attempt=1, node=node, source="/data", activity="copying", bytes_done=done,
        bytes_total=200_000_000, bytes_per_second=10_000_000, eta_seconds=left,
    )  # fmt: skip


def test_copy_that_takes_long_is_no_hang(tmp_path: Path, squeue: Squeue) -> None:
    claim = claimed(1.0, nodes=("gpu01", "gpu02"))
    copies = (staging("gpu01", 150_000_000, 5.0), staging("gpu02", 50_000_000, 135.0))
    run = make_run(tmp_path, claim, *copies)
    squeue(printing(tmp_path, alive(run, "RUNNING")))
    row = StatusCache().summary(run)
    assert (row.staging.node, row.staging.bytes_done) == ("gpu02", 50_000_000), "the slowest"
    assert wait_reason(row) == "copying data, 25%, 10 MB/s, 2:15 left"
    done = [staged(3.0, node=node) for node in ("gpu01", "gpu02")]
    other = make_run(tmp_path, claim, *copies, *done, name="other")
    squeue(printing(tmp_path, alive(other, "RUNNING")))
    assert StatusCache().summary(other).staging is None


def test_many_runs_and_calls_in_quick_succession_cost_one_call_of_squeue(tmp_path: Path, squeue: Squeue) -> None:
    runs = [make_run(tmp_path, CLAIMED, name=f"r{number:02d}") for number in range(20)]
    lines = (alive(run, "RUNNING").replace("7|", f"{number}|", 1) for number, run in enumerate(runs))
    squeue(f"echo called >> {tmp_path}/calls; {printing(tmp_path, *lines)}")
    cache = StatusCache()
    for _ in range(3):
        assert [row.state for row in cache.summaries(runs)] == ["running"] * len(runs)
    assert (tmp_path / "calls").read_text() == "called\n"
