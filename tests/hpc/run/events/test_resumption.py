"""What a resumption puts into force, and which cancellations it takes back."""

from pathlib import Path

import pytest
from support.events import cancelled, records_in, resumed, write_events

from hpc.run.events.kinds import Event, Resumed
from hpc.run.events.resumption import (
    current_spec,
    is_cancelled_now,
    next_resumption,
    record_resumption,
    resumption_file,
)
from hpc.run.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "events").mkdir()
    return RunDir(tmp_path)


def test_each_resumption_has_its_number_and_its_spec(run: RunDir) -> None:
    assert (next_resumption(run), current_spec(run)) == (1, run.spec)
    for number in range(1, 12):
        assert next_resumption(run) == number
        assert record_resumption(run, Resumed(number=number, cancellations=0, attempt=number, by="me"))
        assert current_spec(run) == run.revised_spec(number)
    assert resumption_file(run, 1).name == "resume-001.jsonl", "names sort as numbers do"


def test_resumption_is_recorded_once_with_the_cancellations_that_its_user_saw(run: RunDir) -> None:
    assert record_resumption(run, Resumed(number=1, cancellations=2, attempt=3, by="me"))
    assert not record_resumption(run, Resumed(number=1, cancellations=0, attempt=4, by="another"))
    [event] = records_in(run.events)
    fields = ("event", "number", "cancellations", "attempt", "by")
    assert tuple(event[name] for name in fields) == ("resumed", 1, 2, 3, "me")


@pytest.mark.parametrize(
    ("events", "is_cancelled"),
    [
        ([], False),
        ([cancelled()], True),
        ([cancelled(), resumed(cancellations=1)], False),
        ([cancelled(), resumed(cancellations=1), cancelled()], True),
    ],
)
def test_cancellation_is_read_from_two_kinds_of_file(run: RunDir, events: list[Event], is_cancelled: bool) -> None:
    for event in events:
        file = run.cancellation if event.kind == "cancelled" else run.events / f"resume-{len(events):03d}.jsonl"
        write_events(run, event, file=file.name)
    assert is_cancelled_now(run) is is_cancelled
