"""What `benchmarks/recovery` and `storm.py` conclude from a step log, and the failures of a storm."""

from collections import Counter
from pathlib import Path


def start(at: float, pid: int, step: int, rank: int = 0) -> dict[str, object]:
    return {"event": "start", "time": at, "pid": pid, "rank": rank, "step": step, "host": "gpu01"}


def steps(begin: float, pid: int, *numbers: int) -> list[dict[str, object]]:
    return [
        {"event": "step", "time": begin + index, "pid": pid, "step": number} for index, number in enumerate(numbers)
    ]


def test_a_recovery_is_the_first_step_of_ranks_started_after_the_failure() -> None:
    from benchmarks.recovery.rivals import step_log

    # The old rank makes a step after the failure: it counts as one that may be lost.
    log = [start(0, 1, 0), *steps(1, 1, 1, 2, 3), *steps(5.0, 1, 4), start(9, 2, 2), *steps(10.5, 2, 3, 4)]
    found = step_log.recovery(log, failed_at=4.5)
    assert found == step_log.Recovery(seconds=6.0, steps_lost=2)
    assert step_log.useful_steps(log) == 4
    assert step_log.newest_step(log) == 4


def test_a_training_that_only_started_again_has_not_recovered() -> None:
    from benchmarks.recovery.rivals import step_log

    log = [start(0, 1, 0), *steps(1, 1, 1, 2), start(6, 2, 2)]
    assert step_log.recovery(log, failed_at=4) is None
    # It failed once more before its first step.
    log += [start(8, 3, 0), *steps(9, 3, 1)]
    assert step_log.recovery(log, failed_at=4) == step_log.Recovery(seconds=5.0, steps_lost=2)


def test_each_rank_logs_its_first_step_and_rank_0_all(tmp_path: Path) -> None:
    from benchmarks.recovery.rivals import step_log

    for rank in (1, 0):
        log = step_log.StepLog(tmp_path / "steps.jsonl", rank, 5, imported=3.0)
        for step in (6, 7):
            log.step(step)
    found = step_log.read(tmp_path / "steps.jsonl")
    assert [entry["event"] for entry in found] == ["start", "first_step", "start", "first_step", "step", "step"]
    assert (found[0]["step"], found[0]["imported"], found[-1]["step"]) == (5, 3.0, 7)


def test_a_line_in_the_making_is_not_read(tmp_path: Path) -> None:
    from benchmarks.recovery.rivals import step_log

    path = tmp_path / "steps.jsonl"
    assert step_log.read(path) == []
    path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    assert step_log.read(path) == [{"event": "step", "step": 1}]


def test_a_storm_is_the_same_for_all_and_mixes_its_failures() -> None:
    from benchmarks import storm

    long, short = storm.sequence(5, 60, 3600), storm.sequence(5, 60, 600)
    assert long[: len(short)] == short
    assert long != storm.sequence(6, 60, 3600)
    for begin in range(0, len(long) - 4, 5):
        kinds = Counter(each.kind for each in long[begin : begin + 5])
        assert kinds["worker killed"] == 2
        assert kinds["hung"] == kinds["preempted"] == 1
    assert 30 < 3600 / len(long) < 120
