"""What the benchmarks conclude from measurements; those of restarts, loops and staging are also run once."""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from support.real_images import needs_fashion_mnist

from benchmarks import harness, storm
from benchmarks.harness import Findings, Flags, Sample, versions
from benchmarks.recovery.rivals import step_log
from benchmarks.restart import __main__ as restart
from benchmarks.speed import __main__ as speed
from benchmarks.speed.loops import Case
from benchmarks.staging import __main__ as staging

# --- turns, tables and records ---


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


def test_a_record_has_the_machine_the_options_and_the_rows_and_a_small_form_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(options: Options) -> Findings:
        return Findings(tables={"rows": [{"turns": options.turns}]}, more={"setting": 1})

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["name", "--small"])
    harness.benchmark("name", Options, measure, small={"turns": 1})
    assert "| 1 |" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["name", "--turns=4"])
    harness.benchmark("name", Options, measure, small={"turns": 1})
    record = json.loads((tmp_path / "name.json").read_text())
    assert record.pop("machine")["python"]
    assert record == {"options": {"small": False, "turns": 4}, "setting": 1, "rows": [{"turns": 4}]}
    assert capsys.readouterr().out == "| turns |\n|--:|\n| 4 |\n"


# --- the step log of a recovery, and the failures of a storm ---


def start(at: float, pid: int, step: int, rank: int = 0) -> dict[str, object]:
    return {"event": "start", "time": at, "pid": pid, "rank": rank, "step": step, "host": "gpu01"}


def steps(begin: float, pid: int, *numbers: int) -> list[dict[str, object]]:
    return [
        {"event": "step", "time": begin + index, "pid": pid, "step": number} for index, number in enumerate(numbers)
    ]


def test_a_recovery_is_the_first_step_of_ranks_started_after_the_failure() -> None:
    # The old rank makes a step after the failure: it counts as one that may be lost.
    log = [start(0, 1, 0), *steps(1, 1, 1, 2, 3), *steps(5.0, 1, 4), start(9, 2, 2), *steps(10.5, 2, 3, 4)]
    found = step_log.recovery(log, failed_at=4.5)
    assert found == step_log.Recovery(seconds=6.0, steps_lost=2)
    assert step_log.useful_steps(log) == 4
    assert step_log.newest_step(log) == 4


def test_a_training_that_only_started_again_has_not_recovered() -> None:
    log = [start(0, 1, 0), *steps(1, 1, 1, 2), start(6, 2, 2)]
    assert step_log.recovery(log, failed_at=4) is None
    # It failed once more before its first step.
    log += [start(8, 3, 0), *steps(9, 3, 1)]
    assert step_log.recovery(log, failed_at=4) == step_log.Recovery(seconds=5.0, steps_lost=2)


def test_each_rank_logs_its_first_step_and_rank_0_all(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert step_log.read(path) == []
    for rank in (1, 0):
        log = step_log.StepLog(path, rank, 5, imported=3.0)
        for step in (6, 7):
            log.step(step)
    with path.open("a") as file:
        file.write('{"event": "st')  # a line in the making
    found = step_log.read(path)
    assert [entry["event"] for entry in found] == ["start", "first_step", "start", "first_step", "step", "step"]
    assert (found[0]["step"], found[0]["imported"], found[-1]["step"]) == (5, 3.0, 7)


def test_a_storm_is_the_same_for_all_and_mixes_its_failures() -> None:
    long, short = storm.sequence(5, 60, 3600), storm.sequence(5, 60, 600)
    assert long[: len(short)] == short
    assert long != storm.sequence(6, 60, 3600)
    for begin in range(0, len(long) - 4, 5):
        kinds = Counter(each.kind for each in long[begin : begin + 5])
        assert kinds["worker killed"] == 2
        assert kinds["hung"] == kinds["preempted"] == 1
    assert 30 < 3600 / len(long) < 120


# --- restarts ---


CASE = restart.Case(kind="forked", model="small-cnn", ranks=1)


def test_a_restart_ends_when_the_last_rank_has_made_a_step() -> None:
    found = [
        {"event": "start", "rank": 0, "time": 104.0, "began": 102.0, "imported": 103.5},
        {"event": "start", "rank": 1, "time": 106.0, "began": 103.0, "imported": 105.0},
        {"event": "first_step", "rank": 1, "time": 106.0},
        {"event": "first_step", "rank": 0, "time": 107.0},
        {"event": "step", "time": 108.0},
    ]
    parts = restart.parts_of(found, killed_at=100.0)
    assert parts == {"import": 2.0, "total": 7.0}
    row = restart.row(CASE, [parts, {}])
    assert (row["total, s"], row["least, s"], row["restarts"], row["hung"]) == (7.0, 7.0, 1, 1)


@pytest.mark.slow
@needs_fashion_mnist
def test_a_killed_rank_makes_a_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_SECONDS_BETWEEN_KILLS", 0.0)
    [parts] = restart.restart(CASE, kills=1)
    assert 0 < parts["import"] < parts["total"]


# --- speed ---


def turns(name: str, *speeds: float) -> tuple[speed.LoopOnImages, list[Sample]]:
    """A loop, and its turns of so many images per second."""
    case = Case(model="small-cnn", image_size=64, batch_size=50, workers=1)
    samples = [{"images_per_second": each, "page_faults": 5.2, "mib": 1.0} for each in speeds]
    return speed.LoopOnImages(loop=name, images=speed.JPEG, case=case), list(samples)


def test_turns_of_the_same_round_are_compared() -> None:
    """A slow machine slows both loops down: the ratio is 2, 1 and 4, whatever the round took."""
    found = dict([turns("ours", 1000, 125, 2000), turns("hand-written", 500, 125, 500)])
    ours, by_hand = speed.rows_of(found)
    assert (ours["images_per_second"], ours["least"], ours["most"]) == (1000.0, 125.0, 2000.0)
    assert (ours["by_hand_written"], by_hand["by_hand_written"]) == (2.0, 1.0)
    assert (ours["page_faults_a_step"], ours["mib"]) == (5, 1)


@pytest.mark.slow
def test_a_loop_on_two_ranks_takes_turns(tmp_path: Path) -> None:
    python = Path(sys.executable)
    options = speed.Options(rivals=python, loops=("ours",), seconds=0.1, turns=1)
    [row] = speed.train(options, speed.loops_of(options, "small-cnn", speed.SYNTHETIC, tmp_path))
    assert (row["images"], row["loop"]) == ("in memory", "ours")
    assert row["images_per_second"] > 0
    assert row["mib"] > 0
    assert versions(python, ["torch"]) == {"torch": version("torch")}


# --- staging ---


def test_ours_reads_the_files_once_and_cp_once_per_node(tmp_path: Path) -> None:
    options = staging.Options(files=20, turns=1, nodes=(2,), rate=50.0, source=tmp_path, disks=tmp_path)
    found = staging.measure(options)
    rows = {(row["storage"], row["method"]): row for row in found.tables["rows"]}
    read = {method: row["bytes_read"] for (storage, method), row in rows.items() if storage == "throttled"}
    assert 20 * 80_000 < read["torchrelay"] < 20 * 140_000
    assert read["cp -r"] == 2 * read["torchrelay"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"
