"""The projection: its simulation against the closed form; its table from recoveries like the measured ones."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.projection import __main__ as projection
from benchmarks.projection import failure_model
from benchmarks.projection.failure_model import FailureKind, Job, Restart

DAY = 86_400.0
# Ours: docs/explanation/recovery.md. The other's are Slurm's default waits: 300 s for a dead node, 120 s per requeue.
RECOVERIES: Mapping[str, projection.Seconds] = {
    "ours": {"worker killed": 1.6, "node killed": 23.1, "head node killed": 23.1, "hung": 13.3},
    "ours, with a spare node": {"node killed": 10.6},
    "tutorial": {"worker killed": 130.0, "node killed": 430.0, "head node killed": 430.0, "hung": None},
}


def daly_efficiency(*, mttf: float, interval: float, stall: float, restart: float) -> float:
    """Return the goodput with exponential failures, exact for checkpoints that stop the training.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006), its complete model.
    """
    wall = mttf * math.exp(restart / mttf) * math.expm1((interval + stall) / mttf)
    return interval / wall


def job(*, mttf: float = 6480.0, seconds: float = 300.0, **changes: object) -> Job:
    kind = FailureKind(name="any", share=1.0, seconds=seconds, restart=Restart.IN_PLACE, keeps_snapshots=True)
    values = {"mttf": mttf, "kinds": (kind,), "interval": 228.0, "stall": 4.0} | changes
    return Job(**values)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("mttf", "interval", "stall", "restart"),
    [(6480.0, 228.0, 4.0, 300.0), (28_440.0, 3600.0, 60.0, 400.0), (1000.0, 300.0, 30.0, 200.0)],
)
def test_goodput_is_that_of_the_closed_form(mttf: float, interval: float, stall: float, restart: float) -> None:
    goodput, half_width = failure_model.train(
        job(mttf=mttf, interval=interval, stall=stall, seconds=restart), 1e3 * mttf, (1,), half_width=0.001, most=1000
    )
    exact = daly_efficiency(mttf=mttf, interval=interval, stall=stall, restart=restart)
    assert half_width < 0.003
    assert goodput == pytest.approx(exact, abs=2 * half_width)


def test_youngs_interval_is_about_the_best() -> None:
    best = failure_model.young_interval(4.0, 6480.0)

    def at(interval: float) -> float:
        return daly_efficiency(mttf=6480.0, interval=interval, stall=4.0, restart=0.0)

    assert at(best) > max(at(0.7 * best), at(1.4 * best))


def test_without_failures_only_saving_takes_time() -> None:
    goodput, half_width = failure_model.train(job(mttf=1e15), 2280.0, (1,), half_width=1.0)
    # Ten intervals; the last one needs no checkpoint.
    assert goodput == pytest.approx(2280 / (2280 + 9 * 4))
    assert half_width == 0


def test_snapshots_lose_less_unless_they_die_with_their_node() -> None:
    def lost(*, keeps_snapshots: bool, **changes: float) -> float:
        """The share of the time that is neither productive nor spent on checkpoints and restarts."""
        kind = FailureKind(
            name="any", share=1.0, seconds=0.0, restart=Restart.IN_PLACE, keeps_snapshots=keeps_snapshots
        )
        unsaved = job(kinds=(kind,), stall=0.0, **changes)
        return 1 - failure_model.train(unsaved, 10 * DAY, (1,), half_width=0.0003)[0]

    without = lost(keeps_snapshots=True)
    assert lost(keeps_snapshots=True, snapshot_interval=10.0) < without / 5
    assert lost(keeps_snapshots=False, snapshot_interval=10.0) == pytest.approx(without, rel=0.1)


def test_a_checkpoint_counts_once_it_is_written() -> None:
    slow = job(background=100.0)
    assert slow.saved_after(228 + 4 + 99) == 0
    assert slow.saved_after(228 + 4 + 101) == 228
    assert slow.work_after(228 + 4 + 10) == 238


def test_each_second_lost_node_finds_no_spare() -> None:
    def goodput(*, spares: int) -> float:
        kind = FailureKind(name="node", share=1.0, seconds=0.0, restart=Restart.SPARE, keeps_snapshots=True)
        # What is lost beside the time for new jobs is hardly anything.
        unsaved = job(kinds=(kind,), spares=spares, new_job=100.0, interval=1.0, stall=0.0)
        return failure_model.train(unsaved, 30 * DAY, (1,), half_width=0.0003)[0]

    assert 1 - goodput(spares=1) == pytest.approx((1 - goodput(spares=0)) / 2, rel=0.1)


def test_time_to_failure_between_the_published_sizes() -> None:
    assert projection.mttf_seconds(8) == 47.7 * DAY
    assert 7.9 * 3600 < projection.mttf_seconds(128) < 47.7 * DAY
    # About as many failures per node and day as at the sizes around it.
    assert projection.mttf_seconds(128) * 16 == pytest.approx(45 * DAY, rel=0.1)


def write_recoveries(directory: Path) -> Path:
    measured = [
        {"contender": contender, "failure": failure, "seconds": seconds}
        for contender, found in RECOVERIES.items()
        for failure, seconds in found.items()
    ]
    (directory / "recovery.json").write_text(json.dumps({"rows": measured}))
    return directory / "recovery.json"


def test_the_script_projects_what_was_measured(tmp_path: Path) -> None:
    options = projection.Options(recovery=write_recoveries(tmp_path), days=3.0, half_width=0.02)
    tables = projection.measure(options).tables
    goodput = {(row["contender"], row["gpus"]): row["goodput"] for row in tables["rows"]}
    assert {gpus for _, gpus in goodput} == set(projection.SIZES)
    assert (
        goodput["ours", 16_384] > goodput["tutorial, best interval", 16_384] > goodput["tutorial, every hour", 16_384]
    )
    assert list(tables["by_size"][0])[1:] == ["8 GPUs", "128 GPUs", "1,024 GPUs", "16,384 GPUs"]


def test_without_measurements_it_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"type \.venv/bin/python -m benchmarks\.recovery"):
        projection.measure(projection.Options(recovery=tmp_path / "none.json"))
