"""The files of a ledger: what is written, and which lines are left out."""

import json
from pathlib import Path

import pytest
from support.events import cancelled, claimed, interruption, train_started

from hpc.run.events import ledger
from hpc.run.events.kinds import Cancelled, DataStaged, Problem, Released
from hpc.run.events.ledger import EventWriter


def written(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_event_has_the_attempt_of_its_writer_and_the_time(tmp_path: Path) -> None:
    EventWriter(tmp_path / "x.jsonl", 3).append(Problem(what="image_corrupt", detail="a.png"))
    [line] = written(tmp_path / "x.jsonl")
    assert (line["event"], line["attempt"], line["detail"]) == ("problem", 3, "a.png")
    [event] = ledger.read(tmp_path)
    assert (event.attempt, event.time) == (3, line["time"])


def test_what_has_no_value_is_not_written(tmp_path: Path) -> None:
    """Agents of earlier releases, whose runs go on, refuse an attempt that is null."""
    for event in (Cancelled(final=True), Released()):
        EventWriter(tmp_path / "x.jsonl").append(event)
    assert [sorted(line) for line in written(tmp_path / "x.jsonl")] == [["event", "final", "time"], ["event", "time"]]


def test_name_that_is_not_utf8_is_written_and_read(tmp_path: Path) -> None:
    name = b"/data/caf\xe9".decode(errors="surrogateescape")
    EventWriter(tmp_path / "x.jsonl", 1).append(DataStaged(node="gpu01", source=name))
    assert (tmp_path / "x.jsonl").read_bytes().isascii()
    [event] = ledger.read(tmp_path)
    assert isinstance(event, DataStaged)
    assert event.source == name


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 99_999, b'{"event": "claimed"}', b'{"event": "first_step", "step": 1}',
     b'{"event": "first_step", "time": 1.0, "step": "\xff"}', b'{"event": "first_step", "time": NaN, "step": 1}',
     b'{"event": "first_step", "time": 1.0, "step": true}', b'{"event": "teleported", "time": 1.0}'],
)  # fmt: skip
def test_damaged_line_is_told_and_hides_no_other(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(line + b"\n" + ledger.line_of(cancelled(5.0)).encode())
    events, damage = ledger.read_with_damage(tmp_path)
    assert [event.kind for event in events] == ["cancelled"]
    assert [sentence.partition(" is damaged")[0] for sentence in damage] == [
        f"line 1 of {tmp_path.name}/x.jsonl"
    ] * bool(line)


def test_events_are_in_the_order_of_what_happened(tmp_path: Path) -> None:
    """torchrun replaces failed ranks before the first node's agent has recorded the failure."""
    started, crash = train_started(10.0), interruption(11.0, failed_at=9.0)
    for event in (claimed(1.0), started, crash):
        EventWriter(tmp_path / "x.jsonl").append(event)
    assert [event.kind for event in ledger.read(tmp_path)] == ["claimed", "interruption", "train_started"]
    hang = interruption(11.0, "hang", failed_at=9.0)
    EventWriter(tmp_path / "y.jsonl").append(hang)
    assert [event.kind for event in ledger.read(tmp_path)][-1] == "interruption", "a hang is noticed before"
