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


def ended(*steps: int) -> list[RankStart]:
    return [RankStart(rank=rank, restarts=0, has_ended=True, counted_steps=step) for rank, step in enumerate(steps)]


def test_first_step_and_the_last_one_are_noticed() -> None:
    counted = CountedSteps()
    assert counted.update(ranks(0, 0, phase=UNWATCHED), [], 2) is None
    assert counted.done is None
    assert counted.update(ranks(1, 2), [], 2) == FirstStep(step=2)
    assert counted.update(ranks(9, 8), [], 2) is None
    record = counted.to_record() or {}
    assert (record["steps"], record["step_seconds"]) == (9, 0.5)
    assert counted.to_record() is None
    counted.update([], ended(11)[:1], 2)
    assert counted.done == 9, "the other rank may have failed"
    counted.update([], ended(11, 11), 2)
    assert counted.done == 11


def test_ranks_that_are_being_killed_do_not_count_for_those_that_follow() -> None:
    counted = CountedSteps()
    counted.update(ranks(9, 9), [], 2)
    counted.restart()
    assert counted.update(ranks(9, 10), [], 2) is None
    assert counted.done is None
    counted.update([], [], 2)
    assert counted.update(ranks(1), [], 2) == FirstStep(step=1)
    assert counted.done == 1


def test_ranks_that_torchrun_has_restarted_before_their_failure_is_noticed_count_at_once() -> None:
    def running(restarts: int) -> list[RankStart]:
        return [RankStart(rank=rank, restarts=restarts, has_ended=False) for rank in range(2)]

    counted = CountedSteps()
    counted.update(ranks(9, 9), running(0), 2)
    counted.update(ranks(1, 1), running(1), 2)
    assert counted.done == 9, "which the failure will name"
    counted.restart(after=0)
    assert counted.update(ranks(9, 9), running(0), 2) is None
    assert counted.update(ranks(2, 3), running(1), 2) == FirstStep(step=3)
    counted.restart(after=1)
    assert counted.update(ranks(5, 5), running(1), 2) is None
    assert counted.done is None


def test_script_that_reports_its_steps_is_believed() -> None:
    counted = CountedSteps()
    counted.update(ranks(3, 3), [], 2)
    counted.update([*ranks(5), *ranks(1000, phase="script")], [], 2)
    assert counted.done is None
    counted.update(ranks(7, 7), [], 2)
    assert counted.done is None
