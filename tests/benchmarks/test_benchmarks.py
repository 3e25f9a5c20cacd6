"""What the benchmarks conclude from measurements; that of staging is also run once."""

from pathlib import Path

from benchmarks import host
from benchmarks.harness import Sample
from benchmarks.recovery.rivals import step_log
from benchmarks.speed import __main__ as speed
from benchmarks.speed.loops import Case, hand_written
from benchmarks.speed.our_loop import ours
from benchmarks.staging import __main__ as staging
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import rank_info_from

# --- the step log of a recovery ---


def start(at: float, pid: int, step: int, rank: int = 0) -> dict[str, object]:
    return {"event": "start", "time": at, "pid": pid, "rank": rank, "step": step, "host": "gpu01"}


def steps(begin: float, pid: int, *numbers: int) -> list[dict[str, object]]:
    return [
        {"event": "step", "time": begin + index, "pid": pid, "step": number} for index, number in enumerate(numbers)
    ]


def test_a_recovery_is_the_first_step_of_ranks_started_after_the_failure() -> None:
    # The old rank makes a step after the failure: it counts as one that may be lost.
    log = [start(0, 1, 0), *steps(1, 1, 1, 2, 3), *steps(5.0, 1, 4), start(9, 2, 2), *steps(10.5, 2, *range(3, 9))]
    found = step_log.recovery(log, failed_at=4.5)
    assert found == step_log.Recovery(seconds=6.0, steps_lost=2)
    assert step_log.useful_steps(log) == 8
    assert step_log.newest_step(log) == 8


def test_a_training_that_stops_again_after_a_few_steps_has_not_recovered() -> None:
    log = [start(0, 1, 0), *steps(1, 1, 1, 2), start(6, 2, 1), *steps(7, 2, 2, 3)]
    assert step_log.recovery(log, failed_at=4) is None
    log += [start(18, 3, 0), *steps(19, 3, *range(1, 6))]
    assert step_log.recovery(log, failed_at=4) is None
    log += steps(24, 3, 6)
    assert step_log.recovery(log, failed_at=4) == step_log.Recovery(seconds=15.0, steps_lost=2)


# --- speed ---


def turns(name: str, *speeds: float) -> tuple[speed.LoopOnImages, list[Sample]]:
    """A loop, and its turns of so many images per second."""
    case = Case(model="small-cnn", image_size=64, batch_size=50, workers=1)
    samples = [{"images_per_second": each, "page_faults": 5.2, "mib": 1.0} for each in speeds]
    return speed.LoopOnImages(loop=name, images=speed.JPEG, case=case), list(samples)


def test_turns_of_the_same_round_are_compared() -> None:
    """A slow machine slows both loops down: the ratio is 2, 1 and 4, whatever the round took."""
    found = dict([turns("ours", 1000, 125, 2000), turns("hand-written", 500, 125, 500)])
    own, by_hand = speed.rows_of(found)
    assert (own["images_per_second"], own["least"], own["most"]) == (1000.0, 125.0, 2000.0)
    assert (own["by_hand_written"], by_hand["by_hand_written"]) == (2.0, 1.0)
    assert (own["page_faults_a_step"], own["mib"]) == (5, 1)


# --- the host's work ---


def test_a_step_asks_hardly_more_of_the_host_than_the_hand_written_loop(tmp_path: Path) -> None:
    """Where a GPU computes fast, each operation that torch dispatches costs speed."""
    group = connect(rank_info_from({}))
    case = Case(model="resnet18", image_size=32, batch_size=2, amp="none", classes=10)
    loops = {"by hand": hand_written(case, group.device), "ours": ours(case, group, tmp_path)}
    counts = {}
    for name, loop in loops.items():
        host.make_steps(loop, 2)
        counts[name] = host.operations(loop, 4)
    disconnect()
    assert counts["ours"].total() <= 1.1 * counts["by hand"].total(), counts["ours"] - counts["by hand"]


# --- staging ---


def test_ours_reads_the_files_once_and_cp_once_per_node(tmp_path: Path) -> None:
    options = staging.Options(files=20, turns=1, nodes=(2,), rate=50.0, source=tmp_path, disks=tmp_path)
    found = staging.measure(options)
    rows = {(row["storage"], row["method"]): row for row in found.tables["rows"]}
    read = {method: row["bytes_read"] for (storage, method), row in rows.items() if storage == "throttled"}
    assert 20 * 80_000 < read["torchrelay"] < 20 * 140_000
    assert read["cp -r"] == 2 * read["torchrelay"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"
