"""The warnings of `hpc status`, from ledgers."""

from typing import Any

import pytest

from hpc.status.warnings import save_seconds, warnings_of

SUBMITTED = {"time": 0.0, "event": "submitted", "job_id": "7", "stop_lead_seconds": 30, "grace_seconds": 20}


def stopped(seconds: float) -> dict[str, Any]:
    return {"time": 9.0, "event": "train_stopped", "attempt": 1, "step": 5, "signal": "SIGTERM", "seconds": seconds}


def claimed(attempt: int) -> dict[str, Any]:
    return {"time": 1.0, "event": "claimed", "attempt": attempt}


def test_longest_save_counts() -> None:
    saved = {"time": 3.0, "event": "checkpoint_saved", "attempt": 1, "step": 5, "seconds": 4.0, "copy_seconds": 0.5}
    assert save_seconds([SUBMITTED]) is None
    assert save_seconds([saved, stopped(3.0)]) == 4.5
    assert save_seconds([saved, stopped(5.0)]) == 5.0


@pytest.mark.parametrize(
    ("seconds", "flags"),
    [(7.0, []), (9.0, ["GraceTime=22"]), (17.0, ["--stop-lead 1m", "GraceTime=32"]),
     (25.0, ["--stop-lead 1m", "GraceTime=42"]), (100.0, ["--stop-lead 4m", "GraceTime=135"])],
)  # fmt: skip
def test_slow_save_is_warned_of_with_the_flag_to_change(seconds: float, flags: list[str]) -> None:
    warnings = warnings_of([SUBMITTED, stopped(seconds)])
    assert len(warnings) == len(flags)
    for warning, flag in zip(warnings, flags, strict=True):
        assert flag in warning
        assert f"took {seconds:.1f} s" in warning


def test_without_a_known_grace_there_is_nothing_to_compare_with() -> None:
    (warning,) = warnings_of([{**SUBMITTED, "grace_seconds": None}, stopped(25.0)])
    assert warning == (
        "saving took 25.0 s; the stop signal comes 30 s before the time limit, and the requeue needs the last 10 s: "
        "submit with --stop-lead 1m"
    )
    assert warnings_of([{"time": 0.0, "event": "submitted", "job_id": "7"}, stopped(25.0)]) == []


def test_slow_rank_of_this_attempt_is_named() -> None:
    slow = {
        "time": 5.0, "event": "slow_rank", "attempt": 1, "rank": 3, "node": "gpu02", "busy_seconds": 0.25,
        "median_seconds": 0.1,
    }  # fmt: skip
    (warning,) = warnings_of([claimed(1), slow])
    assert warning.startswith("rank 3 on gpu02 needs 0.25 s per step, the others 0.1 s")
    assert warnings_of([claimed(1), slow, claimed(2)]) == [], "another attempt has other nodes"


def test_run_without_snapshots_has_the_reason() -> None:
    off = {"time": 5.0, "event": "snapshot_off", "attempt": 1, "reason": "/dev/shm has 60 MB free"}
    assert warnings_of([claimed(1), off]) == ["snapshots are off: /dev/shm has 60 MB free"]


def test_ranks_that_could_not_be_forks_have_the_reason() -> None:
    slow = {"time": 5.0, "event": "not_forked", "attempt": 1, "node": "gpu02", "detail": "torch 9 had queried the GPUs"}
    (warning,) = warnings_of([claimed(1), slow])
    assert warning.startswith("ranks on gpu02 start seconds later than necessary: torch 9 had queried the GPUs; ")
    assert warnings_of([claimed(1), slow, claimed(2)]) == []


@pytest.mark.parametrize(
    ("cause", "advice"), [("no_space", "make room"), ("bad_input", "new name"), ("preempted", None)]
)
def test_failure_that_needs_a_person_has_advice(cause: str, advice: str | None) -> None:
    ended = {"time": 5.0, "event": "attempt_ended", "attempt": 1, "cause": cause}
    warnings = warnings_of([claimed(1), ended])
    assert len(warnings) == (advice is not None)
    assert all(str(advice) in warning for warning in warnings)
    assert warnings_of([claimed(1), ended, claimed(2)]) == []


def test_data_that_are_not_on_the_nodes_disk_are_warned_of() -> None:
    def staged(**fields: Any) -> dict[str, Any]:
        return {
            "time": 2.0,
            "event": "staged",
            "attempt": 1,
            "node": "gpu01",
            "source": "/photos",
            "in_place": None,
            **fields,
        }

    assert warnings_of([SUBMITTED, claimed(1), staged()]) == []
    [warning] = warnings_of([SUBMITTED, claimed(1), staged(), staged(in_place="no room"), staged()])
    assert warning.startswith("gpu01 reads /photos in place, without a copy: no room; set --stage-dir")
    [warning] = warnings_of([SUBMITTED, claimed(1), staged(in_memory=True)])
    assert "is RAM-backed" in warning
    assert "--mem" in warning
    [warning] = warnings_of([SUBMITTED, claimed(1), staged(shared="gpu02 uses it too")])
    assert warning.startswith("the copy of /photos on gpu01 is on no disk of that node's own (gpu02 uses it too): set")
    assert warnings_of([SUBMITTED, claimed(1), staged(in_place="no room"), claimed(2)]) == []


def test_job_that_started_nothing_says_why_until_another_one_starts() -> None:
    refused = {"time": 5.0, "event": "refused", "job_id": "12", "restart": 0, "detail": "run r was cancelled: type x"}
    assert warnings_of([SUBMITTED, claimed(1), refused]) == ["job 12: run r was cancelled: type x"]
    assert warnings_of([SUBMITTED, refused, {**claimed(1), "time": 6.0}]) == []
    resumed = {"time": 6.0, "event": "resumed", "attempt": 1, "number": 1, "cancellations": 1}
    assert warnings_of([SUBMITTED, claimed(1), refused, resumed]) == []


def test_times_that_the_run_was_resumed_with_count() -> None:
    resumed = {"time": 8.0, "event": "resumed", "attempt": 1, "stop_lead_seconds": 300, "grace_seconds": 90}
    assert len(warnings_of([SUBMITTED, stopped(25.0)])) == 2
    assert warnings_of([SUBMITTED, stopped(25.0), resumed]) == []


def test_completed_run_has_only_the_warning_about_its_result() -> None:
    slow = {"time": 2.0, "event": "slow_rank", "attempt": 1, "rank": 3, "node": "a", "busy_seconds": 2.0}
    off = {"time": 3.0, "event": "snapshot_off", "attempt": 1, "reason": "no room"}
    ended = {"time": 4.0, "event": "train_completed", "attempt": 1, "learned_nothing": "it has learned nothing"}
    events = [SUBMITTED, claimed(1), {**slow, "median_seconds": 1.0}, off, ended]
    assert len(warnings_of(events)) == 3
    assert warnings_of(events, completed=True) == ["it has learned nothing"]
