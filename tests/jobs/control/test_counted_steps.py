"""The steps that the ranks of a script count, from one start to the next."""

from hpc.run.events.kinds import FirstStep
from jobs.control.counted_steps import CountedSteps
from jobs.control.messages import RankHeartbeat, RankStart
from jobs.control.rank_health import COUNTED, UNWATCHED


def ranks(*steps: int, phase: str = COUNTED) -> list[RankHeartbeat]:
    return [
        RankHeartbeat(
            rank=rank, step=step, phase=phase, state="S", still_seconds=0.0, step_seconds=0.5, busy_seconds=None
        )
        for rank, step in enumerate(steps)
    ]


def running(restarts: int = 0) -> list[RankStart]:
    return [RankStart(rank=rank, restarts=restarts, has_ended=False) for rank in range(2)]


def ended(*steps: int) -> list[RankStart]:
    return [RankStart(rank=rank, restarts=0, has_ended=True, counted_steps=step) for rank, step in enumerate(steps)]


def test_first_step_and_the_last_one_are_noticed() -> None:
    counted = CountedSteps()
    assert counted.update(1, ranks(0, 0, phase=UNWATCHED), running(), 2) is None
    assert counted.done is None
    assert counted.update(1, ranks(1, 2), running(), 2) == FirstStep(step=2)
    assert counted.update(1, ranks(9, 8), running(), 2) is None
    record = counted.to_record() or {}
    assert (record["steps"], record["step_seconds"]) == (9, 0.5)
    assert counted.to_record() is None
    counted.update(1, [], ended(11)[:1], 2)
    assert counted.done == 9, "the other rank may have failed"
    counted.update(1, [], ended(11, 11), 2)
    assert counted.done == 11


def test_each_start_counts_from_0() -> None:
    counted = CountedSteps()
    counted.update(1, ranks(9, 9), running(), 2)
    counted.update(1, [], [], 2)
    assert counted.done == 9
    counted.update(2, [], [], 2)
    assert counted.done is None
    assert counted.update(2, ranks(1, 0), running(), 2) == FirstStep(step=1)
    assert counted.update(2, ranks(1, 5), [*running(1)[:1], *running()[1:]], 2) == FirstStep(step=1)
    assert counted.done == 1, "only rank 0 has been restarted"
    assert counted.update(2, ranks(2, 3), running(1), 2) is None
    assert counted.done == 3


def test_script_that_reports_its_steps_is_believed() -> None:
    counted = CountedSteps()
    counted.update(1, ranks(3, 3), running(), 2)
    counted.update(1, [*ranks(5), *ranks(1000, phase="script")], running(), 2)
    assert counted.done is None
    counted.update(1, ranks(7, 7), running(), 2)
    assert counted.done is None
