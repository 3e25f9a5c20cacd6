"""Which ranks hang, and which slow the others down."""

from dataclasses import replace

import pytest

from hpc.base.units import Duration
from jobs.control import rank_health
from jobs.control.messages import RankHeartbeat
from jobs.control.rank_health import COUNTED, UNWATCHED, StragglerDetector, find_hang, timeout_seconds


def heartbeat(rank: int, still: float = 0.0, step: int = 10, phase: str = "step", state: str = "S") -> RankHeartbeat:
    return RankHeartbeat(
        rank=rank, step=step, phase=phase, state=state, still_seconds=still, step_seconds=0.5, busy_seconds=0.1
    )


def of(*heartbeats: RankHeartbeat) -> dict[int, RankHeartbeat]:
    return {each.rank: each for each in heartbeats}


def test_timeout_follows_the_step_time() -> None:
    assert timeout_seconds(heartbeat(0), None) == 60.0
    assert timeout_seconds(replace(heartbeat(0), step_seconds=10.0), None) == 200.0
    for phase in ("load", "step", "evaluate"):
        assert timeout_seconds(heartbeat(0, phase=phase), Duration(30)) == 30.0


def test_start_first_step_and_saving_have_a_long_timeout() -> None:
    for patient in (heartbeat(0, phase="start"), heartbeat(0, phase="save"), replace(heartbeat(0), step_seconds=None)):
        assert timeout_seconds(patient, Duration(5)) == timeout_seconds(patient, None) == 900.0


def test_script_that_may_be_evaluating_has_a_long_timeout_unless_its_user_gives_one() -> None:
    script = heartbeat(0, phase="script")
    assert timeout_seconds(script, None) == timeout_seconds(replace(script, step_seconds=None), None) == 900.0
    assert timeout_seconds(replace(script, step_seconds=60.0), None) == 1200.0
    assert timeout_seconds(script, Duration(30)) == 30.0


def test_ranks_that_wait_for_one_that_saves_do_not_hang() -> None:
    assert find_hang(of(heartbeat(0, still=31, phase="save"), heartbeat(1, still=31)), Duration(30)) is None
    assert find_hang(of(heartbeat(0, still=901, phase="save"), heartbeat(1, still=901)), Duration(30)) is not None


def test_ranks_without_heartbeats_hang_only_if_the_user_asks_for_it() -> None:
    def found(still: float, timeout: Duration | None) -> str | None:
        hang = find_hang(of(*(heartbeat(rank, still=still, phase=UNWATCHED) for rank in (0, 1))), timeout)
        return hang.detail if hang else None

    assert found(1e9, None) is None
    assert (found(1199, Duration(1200)), found(899, Duration(10))) == (None, None)
    assert found(1201, Duration(1200)) == "no rank has used the processor, or read or written anything, for 1201 s"


def test_ranks_without_heartbeats_wait_for_those_with_them() -> None:
    found = find_hang(of(heartbeat(0, still=31), heartbeat(1, still=5, phase=UNWATCHED)), Duration(30))
    assert found is not None
    assert found.detail == "no rank has moved for 31 s: 1 in step after step 10"


def test_ranks_whose_steps_are_counted_hang_together() -> None:
    def found(*ranks: RankHeartbeat) -> str | None:
        hang = find_hang(of(*ranks), Duration(30))
        return hang.detail if hang else None

    late, later = heartbeat(0, still=31, phase=COUNTED), heartbeat(1, still=31, step=11, phase=COUNTED)
    assert found(late, later) == (
        "rank 0 has been in the script after step 10 since its start for 31 s, and the others wait for it"
    )
    evaluates, not_begun = replace(later, still_seconds=29.0), heartbeat(1, still=31, step=0, phase=UNWATCHED)
    assert found(late, evaluates) is None
    assert found(late, not_begun) is None, "a rank that has done no step may be far behind, or need none"
    assert timeout_seconds(late, None) == 900.0
    reports = heartbeat(1, still=31, phase="script")
    assert found(replace(late, still_seconds=0.0), reports) == "no rank has moved for 31 s: 1 in script after step 10"


def test_stopped_process_hangs_in_every_phase() -> None:
    """`hpc drill hang` may stop a rank that saves: nobody should wait a quarter of an hour for it."""
    for phase in ("start", "save", "evaluate", "script", UNWATCHED):
        others = heartbeat(0, still=31, phase=phase)
        found = find_hang(of(others, heartbeat(1, still=31, phase=phase, state="T")), Duration(30))
        assert found is not None
        assert found.detail == "rank 1 is stopped, and the others wait for it"
        assert find_hang(of(others, heartbeat(1, still=29, phase=phase, state="T")), Duration(30)) is None
    assert find_hang(of(heartbeat(0, phase="save"), heartbeat(1, still=61, phase="save", state="T")), None) is not None


OTHERS = "and the others wait for it"


@pytest.mark.parametrize(
    ("heartbeats", "rank", "detail"),
    [
        (
            (*(heartbeat(rank, still=31) for rank in (0, 1, 3)), heartbeat(2, still=31, phase="load")),
            *(2, f"rank 2 has been in load after step 10 for 31 s, {OTHERS}"),
        ),
        (
            (heartbeat(0, still=31), heartbeat(1, still=31, state="D")),
            *(1, f"rank 1 waits in the kernel for a device or storage, {OTHERS}"),
        ),
        (
            (heartbeat(0, still=31, step=11, phase="load"), heartbeat(1, still=31)),
            *(1, f"rank 1 has been in step after step 10 for 31 s, {OTHERS}"),
        ),
        ((heartbeat(0, still=31), heartbeat(1, still=35)), None, "no rank has moved for 35 s: 2 in step after step 10"),
        (
            tuple(heartbeat(rank, still=31, state="D") for rank in (0, 1)),
            *(None, "no rank has moved for 31 s: 2 in step after step 10"),
        ),
    ],
    ids=["stopped alone", "cannot be killed", "a step behind", "all", "none dies"],
)
def test_rank_for_which_the_others_wait_is_named(
    heartbeats: tuple[RankHeartbeat, ...], rank: int | None, detail: str
) -> None:
    found = find_hang(of(*heartbeats), Duration(30))
    assert found is not None
    assert (found.rank, found.detail) == (rank, detail)
    assert found.unkillable == tuple(each.rank for each in heartbeats if each.state == "D")
    assert found.seconds == max(each.still_seconds for each in heartbeats)


@pytest.mark.parametrize(("still", "hangs"), [(60.0, False), (60.25, True)])
def test_rank_hangs_once_it_has_exceeded_its_limit(still: float, hangs: bool) -> None:
    found = find_hang(of(heartbeat(0, still=still), heartbeat(1, still=61.0)), None)
    assert (found is not None) is hangs
    assert found is None or found.seconds == 61.0, "of the one that has been still for longest"


@pytest.mark.parametrize(
    ("busy", "slow"),
    [
        ((0.1, 0.1, 0.19), []),
        ((0.1, 0.1, 0.2), [2]),
        ((0.01, 0.01, 0.025), []),
        ((0.01, 0.01, 0.03), [2]),
        ((0.1, 0.3), [1]),
        ((0.1, 0.1, 0.3, 0.3), [2, 3]),
        ((0.1, 0.3, 0.3), []),
        ((None, 0.1, 0.3), [2]),
        ((0.3,), []),
    ],
)
def test_straggler_needs_twice_the_usual_time_for_its_own_work(
    monkeypatch: pytest.MonkeyPatch, busy: tuple[float | None, ...], slow: list[int]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(rank_health.time, "monotonic", lambda: clock[0])
    detector = StragglerDetector()
    ranks = of(*(replace(heartbeat(rank), busy_seconds=seconds) for rank, seconds in enumerate(busy)))
    for clock[0] in (0.0, 10.0):
        assert detector.find(ranks) == []
    clock[0] = 10.25
    assert [straggler.rank for straggler in detector.find(ranks)] == slow


def test_rank_that_is_fast_again_is_slow_anew_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(rank_health.time, "monotonic", lambda: clock[0])
    detector = StragglerDetector()
    fast = of(heartbeat(0), heartbeat(1), heartbeat(2))
    slow = fast | of(replace(heartbeat(2), busy_seconds=0.3))
    reported = []
    for clock[0], ranks in (
        (0, slow),
        (5, fast),
        (6, slow),
        (12, slow),
        (17, slow),
        (30, fast),
        (31, slow),
        (42, slow),
    ):
        reported += [clock[0] for _ in detector.find(ranks)]
    assert reported == [17, 42]
