"""Contenders take turns, and what they found becomes a table and a record."""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Findings, Flags


def test_each_turn_begins_with_another_contender_and_the_first_may_not_count() -> None:
    order: list[str] = []

    def turn(name: str) -> list[harness.Sample]:
        order.append(name)
        return [{"number": len(order)}]

    found = harness.take_turns({name: partial(turn, name) for name in "abc"}, 2, warm_up=True)
    assert "".join(order) == "abcbcacab"
    assert [sample["number"] for sample in found["b"]] == [4, 9]
    assert harness.medians(found["b"], unit=", s") == {"number, s": 6.5}
    assert harness.spread([3, 1, 2]) == {"least": 1, "most": 3}


def test_a_table_has_the_columns_of_all_rows_but_lists() -> None:
    rows = [{"name_of_it": "a", "seconds": 1.5, "all": [1]}, {"name_of_it": "b", "seconds": None, "more": "c"}]
    assert harness.table(rows).splitlines() == [
        "| name of it | seconds | more |", "|---|--:|---|", "| a | 1.5 |  |", "| b |  | c |",
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    turns: int = 3
    """Of each."""
    place: Path = Path("/somewhere")
    """Where."""


def measure(options: Options) -> Findings:
    return Findings(tables={"rows": [{"turns": options.turns}]}, more={"setting": 1})


def test_a_record_has_the_machine_the_options_and_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["name", "--turns=4"])
    harness.benchmark("name", Options(), measure, small={"turns": 1})
    record = json.loads((tmp_path / "name.json").read_text())
    assert record.pop("machine")["python"]
    assert record == {"options": {"small": False, "turns": 4}, "setting": 1, "rows": [{"turns": 4}]}
    assert capsys.readouterr().out == "| turns |\n|--:|\n| 4 |\n"


def test_a_small_form_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["name", "--small"])
    harness.benchmark("name", Options(), measure, small={"turns": 1})
    assert "| 1 |" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
