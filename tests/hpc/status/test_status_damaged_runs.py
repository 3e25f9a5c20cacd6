"""Damage in one run affects only its row: wrong values in the fields of events, and incomplete files."""

import io
import json
import random
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console
from support.cluster import JSON_SCHEMA
from support.reported_runs import pending_run

from hpc.base.files import append_json_line
from hpc.report.gather import gather
from hpc.run.rundir import RunDir
from hpc.status.details import view
from hpc.status.run_view import StatusCache
from hpc.status.summary import Summary
from hpc.supervise.decide import decide
from hpc.supervise.observe import observe

NODES = ["a1", "a2"]
# Every kind of event that `hpc status` reads, in a possible order.
EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "submitting", "cluster": "slurm", "host": "login", "pid": 4, "started": 5},
    {"event": "submitted", "job_id": "7", "cluster": "slurm", "stop_lead_seconds": 30, "grace_seconds": 20},
    {"event": "refused", "job_id": "7", "restart": 0, "detail": "it waits for another"},
    {"event": "claimed", "attempt": 1, "job_id": "7", "restart": 0, "secret": "a", "port": 1, "nodes": NODES},
    {"event": "joined", "attempt": 1, "node": "a2", "node_rank": 1, "clock_skew_seconds": 0.1},
    {"event": "staging", "attempt": 1, "node": "a1", "source": "/d", "activity": "copying", "bytes_done": 1,
     "bytes_total": 9, "bytes_per_second": 1.0, "eta_seconds": 8.0},
    {"event": "staged", "attempt": 1, "node": "a1", "source": "/d", "in_place": "it does not fit", "in_memory": False},
    {"event": "environment", "attempt": 1, "node": "a1", "python": "/p", "seconds": 1.0, "fallback": None},
    {"event": "rendezvous", "attempt": 1, "round": 1, "port": 2, "members": [0, 1]},
    {"event": "preflight", "attempt": 1, "world_size": 2, "device": "H200", "seconds": 0.1},
    {"event": "train_started", "attempt": 1, "step": 0, "total_steps": 90, "world_size": 2, "seconds": 5.0,
     "connect_seconds": 3.0, "restore_seconds": 0.5, "train_seconds": 0.0},
    {"event": "first_step", "attempt": 1, "step": 1},
    {"event": "slow_rank", "attempt": 1, "rank": 1, "node": "a2", "busy_seconds": 2.0, "median_seconds": 1.0},
    {"event": "checkpoint_saved", "attempt": 1, "step": 30, "seconds": 1.0, "copy_seconds": 0.1},
    {"event": "snapshot_off", "attempt": 1, "reason": "no room"},
    {"event": "tracking_failed", "attempt": 1, "service": "wandb", "reason": "no internet"},
    {"event": "rank_failed", "attempt": 1, "round": 1, "rank": 1, "node": "a2", "exit_code": 1, "signal": None,
     "cause": "crashed", "step": 40, "detail": "KeyError", "started_at": 1.0, "failed_at": 1.0},
    {"event": "node_lost", "attempt": 1, "node": "a2", "last_heard": 1.0, "detail": "no heartbeat"},
    {"event": "interruption", "attempt": 1, "round": 1, "cause": "crashed", "step": 40, "rank": 1, "node": "a2",
     "detail": "KeyError", "failed_at": 1_700_000_016.5, "noticed_at": 1_700_000_017.0, "signature": "1: KeyError",
     "pause_seconds": 0.0},
    {"event": "node_returned", "attempt": 1, "node": "a2"},
    {"event": "train_started", "attempt": 1, "step": 30, "total_steps": 90, "world_size": 2, "train_seconds": 1.0},
    {"event": "train_stopped", "attempt": 1, "step": 50, "signal": "SIGTERM", "seconds": 28.0},
    {"event": "attempt_ended", "attempt": 1, "cause": "preempted", "step": 50, "detail": None, "rank": 1,
     "last_heard": None, "failed_at": None, "node": None, "signature": None},
    {"event": "resubmitting", "attempt": 1, "host": "login", "pid": 4, "started": 5},
    {"event": "resubmitted", "attempt": 1, "job_id": "8", "old_job_id": "7", "excluded": ["a2"]},
    {"event": "notifying", "notice": "failed-001", "recipient": "hook", "host": "a1"},
    {"event": "notification_failed", "notice": "failed-001", "recipient": "hook", "reason": "no answer"},
    {"event": "cancelled", "by": "u", "final": False},
    {"event": "resumed", "attempt": 1, "number": 1, "cancellations": 1, "by": "u", "changed": {}, "grace_seconds": 9},
    {"event": "claimed", "attempt": 2, "job_id": "8", "restart": 0, "secret": "a", "port": 1, "nodes": NODES},
    {"event": "train_started", "attempt": 2, "step": 50, "total_steps": 90, "world_size": 2, "train_seconds": 2.0},
    {"event": "first_step", "attempt": 2, "step": 51},
    {"event": "train_completed", "attempt": 2, "step": 90, "ended": None},
    {"event": "not_continued", "attempt": 2, "detail": "no sbatch"},
    {"event": "scancelled", "attempt": 2, "job_id": "8"},
    {"event": "attempt_ended", "attempt": 2, "cause": "bad_input", "step": 90, "detail": "x", "rank": 1},
)  # fmt: skip
MISSING = object()
ROW = jsonschema.Draft202012Validator({**JSON_SCHEMA, "$ref": "#/$defs/run"})
VALUES = (
    MISSING, None, True, -1, 0, 7, 2**70, 10**400, 0.5, float("nan"), float("inf"), 1e308, 4e15, 1e12, "", "x",
    "\ud800", "claimed", "interruption", "attempt_ended", "completed", [], [None], ["a1"], [99], [[1]], {},
    {"a": float("nan")},
)  # fmt: skip


def write(path: Path, events: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def one_field_changed(choose: random.Random) -> list[dict[str, Any]]:
    """The events of a run up to some moment; one field of one event is changed."""
    events = [{"time": 1_700_000_000.0 + at, **event} for at, event in enumerate(EVENTS)]
    events = events[: choose.randint(1, len(events))]
    event = choose.choice(events)
    name, value = choose.choice(list(event)), choose.choice(VALUES)
    event.pop(name) if value is MISSING else event.update({name: value})
    return events


def shown(rows: list[Summary], *, details: bool) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(view(console, rows, details=details))
    return console.export_text()


def strict(text: str) -> Any:
    """Parse JSON as other languages do, without NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunDir, RunDir]:
    """A run to damage, and an intact one."""
    found = (pending_run(tmp_path / "damaged"), pending_run(tmp_path / "sound"))
    for run in found:
        (run.events / "agent.jsonl").unlink()
        run.train_metrics.parent.mkdir()
        append_json_line(run.train_metrics, {"step": 60, "epoch": 1, "loss": 0.5, "train_seconds": 2.5, "time": 1.7e9})
    write(found[1].events / "x.jsonl", [{"time": float(at), **event} for at, event in enumerate(EVENTS[:3])])
    return found


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_value_of_any_field_of_any_event_hides_another_run(runs: tuple[RunDir, RunDir], count: int) -> None:
    choose, (damaged, sound) = random.Random(count), runs
    alone = StatusCache().summary(sound).attempts
    for number in range(count):
        events = one_field_changed(choose)
        write(damaged.events / "x.jsonl", events)
        rows = StatusCache().summaries([damaged, sound])
        ROW.validate(strict(json.dumps([row.document() for row in rows]))[0])
        decide(observe(damaged, {}, time.time()))
        assert rows[1].attempts == alone
        shown(rows[:1], details=True)
        assert "sound" in shown(rows, details=False)
        if number % 20 == 0:
            assert gather(damaged, rows[0]).summary == rows[0]


def test_row_says_what_is_damaged_in_which_file_and_line(runs: tuple[RunDir, RunDir]) -> None:
    damaged, sound = runs
    events = [{"time": float(at), **event} for at, event in enumerate(EVENTS[:13])]
    events[9]["time"] = float("nan")
    write(damaged.events / "agent.jsonl", events)
    rows = StatusCache().summaries([damaged, sound])
    problem = (
        "line 10 of events/agent.jsonl is damaged and left out: Expected `float` >= -1000000000000000.0 - at `$.time`"
    )
    assert rows[0].damaged == [problem]
    assert (rows[0].attempt, rows[0].device, rows[0].step) == (1, None, 60), "the rest is shown"
    assert shown(rows, details=False).splitlines()[-1].strip() == f"damaged: {problem}"
    assert f"warning: {problem}" in shown(rows[:1], details=True)
    assert [note for note in gather(damaged, rows[0]).notes if "line 10" in note] == [problem]

    (damaged.events / "agent.jsonl").write_text('{"time": 1.0, "ev\n\n')
    row = StatusCache().summary(damaged)
    [told] = row.damaged
    assert told.startswith("line 1 of events/agent.jsonl is damaged and left out: Unterminated string")


@pytest.mark.parametrize(
    "name", ["resources", "training", "name", "program", "tracker", "after", "cluster", "recovery"]
)
def test_damaged_spec_hides_no_other_run(name: str, runs: tuple[RunDir, RunDir]) -> None:
    damaged, sound = runs
    fields = json.loads(damaged.spec.read_text())
    for value in (float("nan"), 5, [], {}, "x", None):
        damaged.spec.write_text(json.dumps({**fields, name: value}))
        rows = StatusCache().summaries([damaged, sound])
        strict(json.dumps([row.document() for row in rows]))
        assert "sound" in shown(rows, details=False), value
        shown(rows[:1], details=True)


def test_result_of_other_things_than_numbers_is_shown_without_them(runs: tuple[RunDir, RunDir]) -> None:
    damaged, _ = runs
    damaged.final.mkdir()
    damaged.final_result.write_text('{"test_accuracy": NaN, "best": {"test_accuracy": "high"}}')
    row = strict(json.dumps(StatusCache().summary(damaged).document()))
    assert (row["state"], row["test_accuracy"], row["best_test_accuracy"]) == ("completed", None, None)
    damaged.final_result.write_text("[1]")
    assert StatusCache().summary(damaged).damaged == [f"{damaged.final_result} is damaged: it is not a JSON object"]
