"""What `hpc status` prints of a run that was interrupted, from a run directory."""

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console
from support.events import (
    attempt_ended,
    claimed,
    event,
    first_step,
    interruption,
    of_message,
    recorded_run,
    resources_of,
    submitted,
    train_started,
    train_stopped,
    write_events,
)

from hpc.base.files import append_json_line
from hpc.commands.start import status
from hpc.run.rundir import RunDir
from hpc.status import printing
from hpc.status.details import interruption_table, largest_parts, view
from hpc.status.run_view import summarize

Capture = pytest.CaptureFixture[str]
CRASH = {"rank": 3, "node": "gpu02", "detail": "KeyError: '[x]'", "round": 1}
EVENTS = (
    submitted(0.0, stop_lead_seconds=30),
    claimed(1.0, nodes=("gpu01", "gpu02")),
    train_started(10.0, total_steps=90, world_size=4, seconds=5.0),
    interruption(30.0, step=57, failed_at=29.0, **CRASH),
    train_started(38.0, 55, total_steps=90, world_size=4, seconds=5.0),
    interruption(50.0, step=80, failed_at=49.5, **CRASH),
    train_started(62.0, 79, total_steps=90, world_size=4, seconds=5.0),
    first_step(63.0, 80),
    train_stopped(65.0, 85, seconds=28.0),
    attempt_ended(66.0, "preempted", step=85),
)
RESOURCES = resources_of(nodes="2", gpus_per_node="a100:4", partition="gpu")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = recorded_run(tmp_path / "r", *EVENTS, resources=RESOURCES)
    found.eval_metrics.parent.mkdir()
    append_json_line(found.eval_metrics, {"split": "val", "accuracy": 0.5, "step": 57})
    return found


def printed(capsys: Capture, *arguments: str) -> str:
    assert status.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_control_characters_of_ranks_and_nodes_reach_no_terminal(run: RunDir, capsys: Capture) -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07"
    write_events(
        run,
        claimed(80.0, 2, job_id="8", nodes=(hostile,)),
        interruption(81.0, hostile, attempt=2, step=3, rank=1, node=hostile, detail=hostile, failed_at=80.0),
        event("snapshot_off", 82.0, attempt=2, reason=hostile),
        attempt_ended(83.0, "bad_input", attempt=2, step=3, detail=hostile),
    )
    assert printed(capsys, str(run.path)).count(r"\x1b[2J\x1b]0;owned\x07") >= 5
    assert "\x1b" not in printed(capsys, str(run.path)) + printed(capsys, "--runs-dir", str(run.path.parent))
    assert printing.wait_for_end(run, None) == 1
    waited = capsys.readouterr()
    assert hostile[:4] not in waited.out + waited.err
    assert r"failed: \x1b[2J" in waited.err


def test_lines_of_a_script_may_have_other_things_than_numbers(run: RunDir, capsys: Capture) -> None:
    run.train_metrics.parent.mkdir(exist_ok=True)
    append_json_line(run.train_metrics, {"step": 7, "loss": "low", "images_per_second": [1], "epoch": None})
    (row,) = json.loads(printed(capsys, str(run.path), "--json"))
    names = ("step", "train_loss", "images_per_second", "epoch")
    assert [row[name] for name in names] == [7, None, None, None]
    assert not any("cannot read" in warning for warning in row["warnings"])
    shown = printing.progress(structs.replace(summarize(run, None), state="running", interruptions=()))
    assert shown == "attempt 1: step 7/90"


def test_run_that_is_named_shows_all_that_is_known_of_it(run: RunDir, capsys: Capture) -> None:
    text = printed(capsys, str(run.path))
    facts, _, costs = text.partition("\n\n")
    *lines, warning = facts.splitlines()
    found = {line[:11].strip(): line[11:].strip() for line in lines}
    assert found["job"] == "7, partition gpu, attempt 1"
    assert (found["nodes"], found["GPUs"]) == ("gpu01, gpu02", "8 a100")
    assert found["interrupted"] == "2 crashed, 1 preempted"
    assert found["GPU-hours"] == "0.144"
    assert found["accuracy"] == "50.00% val"
    assert warning.startswith("warning: saving took 28.0 s")
    head, third, second, first = costs.splitlines()
    assert " ".join(head.split()) == "time cause lost steps lost time rank, node message longest parts"
    assert " ".join(first.split()[2:]) == "crashed 2 9.0 s rank 3, gpu02 KeyError: '[x]' notice 1.0"
    assert second.split()[3:6] == ["1", "13.5", "s"]
    assert third.split()[2:] == ["preempted", "-", "-", "-", "-", "notice", "29.0"], "it waits for its next attempt"


ALL_TITLES = "run state job step accuracy ETA loss elapsed GPUs attempt img/s partition interruptions epoch nodes"


def test_run_whose_job_was_replaced_says_why(run: RunDir, capsys: Capture) -> None:
    why = "Slurm holds a requeued job for 120 s"
    write_events(run, event("resubmitted", 90.0, attempt=1, job_id="8", old_job_id="7", excluded=[], detail=why))
    lines = [" ".join(line.split()) for line in printed(capsys, str(run.path)).splitlines()]
    assert f"new job job 7 was not requeued: {why}" in lines
    (row,) = json.loads(printed(capsys, str(run.path), "--json"))
    assert row["why_new_job"] == f"job 7 was not requeued: {why}"


@pytest.mark.parametrize(
    ("width", "titles"), [(160, ALL_TITLES), (80, " ".join(ALL_TITLES.split()[:11])), (12, "run state")]
)
def test_narrow_table_has_the_most_important_columns(run: RunDir, width: int, titles: str) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(view(console, [summarize(run, None)], details=False))
    assert console.export_text().splitlines()[0].split() == titles.split()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_every_row_is_one_line_that_fits(run: RunDir, width: int) -> None:
    row = summarize(run, None)
    names = ["a" * 100, "resnet50-imagenet-baseline-1", "resnet50-imagenet-baseline-2"]
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(view(console, [structs.replace(row, run=name) for name in names], details=False))
    console.print(interruption_table(console, [replace(one, detail="x\t" * 250) for one in row.interruptions]))
    lines = console.export_text().splitlines()
    assert len(lines) == 1 + len(names) + 1 + len(row.interruptions)
    assert max(map(len, lines)) <= width
    assert lines[3].startswith(names[2]), "names that differ at their ends can be told apart"


def test_reason_of_runs_that_wait_stands_below_the_table(run: RunDir) -> None:
    row = structs.replace(summarize(run, None), state="pending", reason="Resources")
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(view(console, [structs.replace(row, run=name) for name in ("one", "two")], details=False))
    assert console.export_text().splitlines()[-1] == "one, two: pending: no nodes are free"


def test_runs_are_chosen_by_owner(run: RunDir, capsys: Capture) -> None:
    everything = ("--runs-dir", str(run.path.parent))
    assert len(printed(capsys, *everything).splitlines()) == 2, "the table alone"
    assert len(json.loads(printed(capsys, *everything, "--mine", "--json"))) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="makes a run of another user")
def test_runs_of_others_are_not_mine(run: RunDir, capsys: Capture) -> None:
    os.chown(run.path, 65534, 65534)
    everything = ("--runs-dir", str(run.path.parent))
    assert len(json.loads(printed(capsys, *everything, "--json"))) == 1
    assert json.loads(printed(capsys, *everything, "--mine", "--json")) == []
    assert printed(capsys, *everything, "--mine").startswith("no runs of yours in")


@pytest.mark.parametrize("final", [True, False], ids=["a training", "a script"])
def test_model_is_named_where_there_is_one(run: RunDir, final: bool, capsys: Capture) -> None:
    write_events(run, claimed(70.0, 2), attempt_ended(90.0, attempt=2, step=None))
    if final:
        run.final.mkdir()
        run.final_result.write_text("{}")
        run.final_model.touch()
    assert printing.wait_for_end(run, None) == 0
    assert (f"model        {run.final_model}" in capsys.readouterr().out) is final


def test_completed_run_without_interruptions_says_so(tmp_path: Path, capsys: Capture) -> None:
    run = recorded_run(tmp_path / "r", submitted(0.0), claimed(1.0), attempt_ended(9.0))
    assert re.search(r"^interrupted  0 *$", printed(capsys, str(run.path)), re.MULTILINE)


def progress_shown(run: RunDir, *, in_terminal: bool) -> str:
    """What --wait prints of a training in two epochs, and after two interruptions."""
    row = structs.replace(
        summarize(run, None), state="running", total_steps=90, images_per_second=8.0, interruptions=()
    )
    trained = [structs.replace(row, epoch=epoch, step=step) for epoch, step in ((1, 7), (1, 8), (2, 31), (2, 32))]
    console = Console(file=io.StringIO(), force_terminal=in_terminal, width=50)
    with printing.progress_line(console) as show:
        for one in [*trained, structs.replace(trained[-1], interruptions=summarize(run, None).interruptions[:1])]:
            show(one)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_wait_prints_a_line_for_each_epoch_and_interruption(run: RunDir, capsys: Capture) -> None:
    progress_shown(run, in_terminal=False)
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
    assert [line.partition("/")[0] for line in lines] == [
        "attempt 1: epoch 1, step 7", "attempt 1: epoch 2, step 31", "attempt 1: epoch 2, step 32",
    ]  # fmt: skip
    assert lines[0] == "attempt 1: epoch 1, step 7/90, 8 images/s"
    assert lines[2].endswith("(interrupted: 1 crashed)")


def test_wait_changes_one_line_in_a_terminal(run: RunDir) -> None:
    text = progress_shown(run, in_terminal=True)
    assert "step 8/90" in text
    assert text.count("\n") == 1, "it has only the line feed of its end"


def test_largest_parts_come_first() -> None:
    parts = {"notice": 1.0, "release": 0.0, "start": 120.0, "stage": 4.0, "rendezvous": 9.0, "restore": None}
    assert largest_parts({**parts, "total": 99.0}) == "start 120.0, rendezvous 9.0, stage 4.0"


def test_message_that_could_not_be_sent_is_shown_until_it_is(run: RunDir, capsys: Capture) -> None:
    message, everything = {"notice": "failed-001", "recipient": "hook"}, ("--runs-dir", str(run.path.parent))
    write_events(run, of_message("notifying", 90.0), of_message("notification_failed", 91.0, reason="no answer"))
    text = " ".join(printed(capsys, str(run.path)).split())
    assert "hook did not get the message failed-001 (no answer): try it with hpc notify hook" in text
    (row,) = json.loads(printed(capsys, *everything, "--json"))
    assert row["unsent"] == [{**message, "problem": "no answer"}]

    write_events(run, of_message("notification_sent", 152.0), file="notice-failed-001-hook-2.jsonl")
    (row,) = json.loads(printed(capsys, *everything, "--json"))
    assert row["unsent"] == []
    assert "hook" not in printed(capsys, str(run.path))
