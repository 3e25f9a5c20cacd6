"""What a resumption puts into force, and which cancellations it takes back."""

from pathlib import Path

import pytest

from hpc.core import ledger
from hpc.core.files import append_json_line
from hpc.core.resumption import (
    current_spec,
    is_cancelled,
    is_cancelled_for_good,
    is_cancelled_now,
    next_resumption,
    record_resumption,
    resumption_file,
)
from hpc.core.rundir import RunDir

CANCELLED = {"time": 1.0, "event": "cancelled"}


def resumed(cancellations: int, time: float = 2.0) -> dict[str, object]:
    return {"time": time, "event": "resumed", "cancellations": cancellations}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "events").mkdir()
    return RunDir(tmp_path)


def test_each_resumption_has_its_number_and_its_spec(run: RunDir) -> None:
    assert (next_resumption(run), current_spec(run)) == (1, run.spec)
    for number in range(1, 12):
        assert next_resumption(run) == number
        assert record_resumption(run, number, [], attempt=number, by="me")
        assert current_spec(run) == run.revised_spec(number)
    assert resumption_file(run, 1).name == "resume-001.jsonl", "names sort as numbers do"


def test_resumption_is_recorded_once_with_the_cancellations_that_its_user_saw(run: RunDir) -> None:
    seen = [CANCELLED, {"time": 1.5, "event": "claimed"}, CANCELLED]
    assert record_resumption(run, 1, seen, attempt=3, by="me")
    assert not record_resumption(run, 1, [], attempt=4, by="another")
    [event] = ledger.read(run.events)
    fields = ("event", "number", "cancellations", "attempt", "by")
    assert tuple(event[name] for name in fields) == ("resumed", 1, 2, 3, "me")


@pytest.mark.parametrize(
    ("events", "cancelled"),
    [
        ([], False),
        ([{"time": 1.0, "event": "claimed"}], False),
        ([CANCELLED], True),
        ([CANCELLED, resumed(1)], False),
        ([CANCELLED, resumed(0)], True),
        ([CANCELLED, resumed(1), CANCELLED], True),
        ([resumed(1, time=0.5), CANCELLED], False),
        ([CANCELLED, resumed(1), CANCELLED, resumed(2)], False),
        ([CANCELLED, CANCELLED, resumed(2), resumed(1)], False),
    ],
)
def test_cancellation_counts_until_it_is_taken_back(
    run: RunDir, events: list[dict[str, object]], cancelled: bool
) -> None:
    assert is_cancelled(events) is cancelled
    for event in events:
        path = run.cancellation if event["event"] == "cancelled" else run.events / f"resume-{len(events):03d}.jsonl"
        append_json_line(path, event)
    assert is_cancelled_now(run) is cancelled


def test_cancellation_is_for_good_if_its_user_said_so() -> None:
    assert is_cancelled_for_good([CANCELLED, {**CANCELLED, "final": True}, resumed(2)])
    assert not is_cancelled_for_good([CANCELLED, {**CANCELLED, "final": False}, {"event": "claimed", "final": True}])
