"""The warnings of `hpc status`, from ledgers."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from support.events import (
    attempt_ended,
    claimed,
    event,
    interruption,
    ranks_started,
    resumed,
    staged,
    submitted,
    train_stopped,
)

from hpc.run.events.history import History
from hpc.run.events.kinds import Event
from hpc.status.warnings import warnings_of

SUBMITTED = submitted(0.0, stop_lead_seconds=30, grace_seconds=20)
FIRST, SECOND = claimed(1.0), claimed(1.0, 2)


def found(events: Sequence[Event], *, completed: bool = False) -> list[str]:
    return warnings_of(History(events), completed=completed)


def test_longest_save_counts() -> None:
    saved = event("checkpoint_saved", 3.0, attempt=1, step=5, seconds=4.0, copy_seconds=0.5)
    assert History([SUBMITTED]).save_seconds is None
    assert History([saved, train_stopped(9.0, seconds=3.0)]).save_seconds == 4.5
    assert History([saved, train_stopped(9.0, seconds=5.0)]).save_seconds == 5.0


@pytest.mark.parametrize(
    ("seconds", "flags"),
    [(7.0, []), (9.0, ["GraceTime=22"]), (17.0, ["--signal-before 1m", "GraceTime=32"]),
     (25.0, ["--signal-before 1m", "GraceTime=42"]), (100.0, ["--signal-before 4m", "GraceTime=135"])],
)  # fmt: skip
def test_slow_save_is_warned_of_with_the_flag_to_change(seconds: float, flags: list[str]) -> None:
    warnings = found([SUBMITTED, train_stopped(9.0, seconds=seconds)])
    assert len(warnings) == len(flags)
    for warning, flag in zip(warnings, flags, strict=True):
        assert flag in warning
        assert f"took {seconds:.1f} s" in warning


def test_without_a_known_grace_there_is_nothing_to_compare_with() -> None:
    (warning,) = found([replace(SUBMITTED, grace_seconds=None), train_stopped(9.0, seconds=25.0)])
    assert warning == (
        "saving took 25.0 s; the stop signal comes 30 s before the time limit, and the requeue needs the last 10 s: "
        "submit with --signal-before 1m"
    )
    assert found([submitted(0.0), train_stopped(9.0, seconds=25.0)]) == []


@pytest.mark.parametrize(
    ("happened", "words"),
    [
        (event("ranks_silent", 5.0, attempt=1, seconds=930.0), "anything, for 16 minutes or more: if the script hangs"),
        (event("ranks_ended", 5.0, attempt=1, ranks=[1, 3]),
         "ranks 1, 3 ended with exit code 0 while the other ranks run"),
        (event("slow_rank", 5.0, attempt=1, rank=3, node="gpu02", busy_seconds=0.25, median_seconds=0.1),
         "rank 3 on gpu02 needs 0.25 s per step, the others 0.1 s"),
        (event("snapshot_off", 5.0, attempt=1, reason="/dev/shm has 60 MB free"),
         "snapshots are off: /dev/shm has 60 MB free"),
        (attempt_ended(5.0, "no_space"), "free some space"),
        (attempt_ended(5.0, "bad_input"), "new name"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)  # fmt: skip
def test_what_is_wrong_with_the_last_attempt_is_said(happened: Event, words: str) -> None:
    (warning,) = found([FIRST, happened])
    assert words in warning
    assert found([FIRST, happened, SECOND]) == [], "another attempt has other nodes"


@pytest.mark.parametrize("after", [ranks_started(6.0), interruption(6.0), attempt_ended(6.0, "crashed")])
def test_ranks_that_ended_early_are_no_matter_once_the_others_have_ended(after: Event) -> None:
    assert found([FIRST, event("ranks_ended", 5.0, attempt=1, ranks=[1]), after]) == []


def test_data_that_are_not_on_the_nodes_disk_are_warned_of() -> None:
    def copied(**fields: Any) -> Event:
        return staged(2.0, source="/photos", **fields)

    assert found([SUBMITTED, FIRST, copied()]) == []
    [warning] = found([SUBMITTED, FIRST, copied(), copied(in_place="no room"), copied()])
    assert warning.startswith("gpu01 reads /photos in place, without a copy: no room; set --stage-dir")
    [warning] = found([SUBMITTED, FIRST, copied(in_memory=True)])
    assert "is RAM-backed" in warning
    assert "--mem" in warning
    assert found([SUBMITTED, FIRST, copied(in_place="no room"), SECOND]) == []


def test_job_that_started_nothing_says_why_until_another_one_starts() -> None:
    refused = event("refused", 5.0, job_id="12", restart=0, detail="run r was cancelled: type x")
    assert found([SUBMITTED, FIRST, refused]) == ["job 12: run r was cancelled: type x"]
    assert found([SUBMITTED, refused, claimed(6.0)]) == []
    assert found([SUBMITTED, FIRST, refused, resumed(6.0, cancellations=1)]) == []


def test_times_that_the_run_was_resumed_with_count() -> None:
    longer = resumed(8.0, stop_lead_seconds=300, grace_seconds=90)
    assert len(found([SUBMITTED, train_stopped(9.0, seconds=25.0)])) == 2
    assert found([SUBMITTED, train_stopped(9.0, seconds=25.0), longer]) == []


def test_completed_run_has_no_warning_about_its_course() -> None:
    slow = event("slow_rank", 2.0, attempt=1, rank=3, node="a", busy_seconds=2.0, median_seconds=1.0)
    off = event("snapshot_off", 3.0, attempt=1, reason="no room")
    ended = event("train_completed", 4.0, attempt=1)
    events = [SUBMITTED, FIRST, slow, off, ended]
    assert len(found(events)) == 2
    assert found(events, completed=True) == []
