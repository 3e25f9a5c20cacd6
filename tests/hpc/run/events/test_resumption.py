"""What a resumption puts into force, and which cancellations it takes back."""

from pathlib import Path

import pytest
from support.events import cancelled, records_in, resumed, write_events

from hpc.run.events.kinds import Resumed
from hpc.run.events.ledger import record_once
from hpc.run.events.resumption import (
    current_spec,
    is_cancelled_now,
    next_resumption,
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
        resumption = Resumed(number=number, cancellations=0, attempt=number)
        assert record_once(resumption_file(run, number), resumption)
        assert current_spec(run) == run.revised_spec(number)
    assert resumption_file(run, 1).name == "resume-001.jsonl", "names sort as numbers do"


def test_resumption_is_recorded_once_with_the_cancellations_that_its_user_saw(run: RunDir) -> None:
    file = resumption_file(run, 1)
    assert record_once(file, Resumed(number=1, cancellations=2, attempt=3))
    assert not record_once(file, Resumed(number=1, cancellations=0, attempt=4))
    [event] = records_in(run.events)
    fields = ("event", "number", "cancellations", "attempt")
    assert tuple(event[name] for name in fields) == ("resumed", 1, 2, 3)


def test_cancellation_is_read_from_two_kinds_of_file(run: RunDir) -> None:
    assert not is_cancelled_now(run)
    for number in (1, 2):
        write_events(run, cancelled(), file=run.cancellation.name)
        assert is_cancelled_now(run)
        write_events(run, resumed(cancellations=number), file=resumption_file(run, number).name)
        assert not is_cancelled_now(run)
