"""How often a run may fail without progress."""

from dataclasses import replace

import pytest

from hpc.run.causes import Cause
from hpc.run.restart_budget import Budget, PastInterruption, budget_after, rank_signature, signature_of

KEY, VALUE = "1: KeyError: 'label'", "1: ValueError: no luck"


def failed(step: int | None, restored: int | None = None, signature: str | None = None) -> PastInterruption:
    return PastInterruption(cause="crashed", step=step, restored_step=restored, signature=signature)


def ended(cause: str, step: int | None = None, restored: int | None = None) -> PastInterruption:
    return PastInterruption(cause=cause, step=step, restored_step=restored)


@pytest.mark.parametrize(("seconds", "step", "failures"), [(3700.0, None, 1), (3500.0, None, 2), (3700.0, 20, 2)])
def test_script_without_steps_has_made_progress_after_an_hour(seconds: float, step: int | None, failures: int) -> None:
    budget = budget_after([replace(failed(step, step, KEY), ran_seconds=ran) for ran in (10.0, seconds)])
    assert (budget.failures, budget.is_repeated) == (failures, failures == 2)


def test_second_kill_in_an_unlucky_minute_ends_nothing() -> None:
    """Of two ranks, 13 s apart: at step 63, and after a restart from step 14 at step 46."""
    signature = rank_signature("crashed", "SIGKILL", -9, "", step=63)
    killed = [failed(63, 0, signature), failed(46, 14, signature)]
    assert budget_after(killed).may_restart
    assert budget_after(killed).failures == 1, "the ranks started from a later step: that is progress"
    assert budget_after([*killed, failed(46, 46, signature)]).may_restart, "as soon as they were back"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (failed(7, 0, KEY), failed(7, 7, KEY), True),
        (failed(7, 0, KEY), failed(9, 7, KEY), True),
        (failed(7, 0, KEY), failed(10, 7, KEY), False),
        (failed(7, 0, KEY), failed(7, 7, VALUE), False),
        (failed(None, None, KEY), failed(None, None, KEY), True),
        (failed(7, 0, KEY), failed(None, None, KEY), True),
        (failed(7, 0), failed(7, 7), False),
        (ended("time_limit", 0), ended("time_limit", 0), True),
        (ended("time_limit", 20, 0), ended("time_limit", 20, 20), False),
    ],
)
def test_same_failure_twice_in_a_row_ends_the_run(
    first: PastInterruption, second: PastInterruption, same: bool
) -> None:
    assert budget_after([first]).may_restart
    assert budget_after([first, second]).may_restart is not same
    assert budget_after([first, ended("preempted", 7), second]).may_restart is not same
    other = failed(3, None, "1: OSError: another one")
    assert budget_after([first, other, second]).may_restart, "not in a row"


@pytest.mark.parametrize(
    ("history", "failures"),
    [
        ([], 0),
        ([ended("preempted", 20)], 0),
        ([failed(None), ended("hang")], 2),
        ([failed(20, 0), ended("preempted", 20), ended("out_of_memory", 20)], 2),
        ([failed(20, 0), failed(10, 0)], 2),
        ([failed(20, 0), failed(21, 18)], 1),
        ([failed(None), failed(1, 1)], 1),
        ([failed(90, 80), failed(70, 50), failed(60, 55)], 1),
        ([ended("time_limit", 20, 0), failed(20, 20)], 1),
        ([ended("time_limit", 0, 0)], 1),
        ([failed(None), ended("preempted"), failed(None)], 1),
        ([failed(20, 0), ended("bad_node", 20), ended("bad_node", 20)], 2),
    ],
)  # fmt: skip
def test_failures_without_progress(history: list[PastInterruption], failures: int) -> None:
    assert budget_after(history).failures == failures


@pytest.mark.parametrize(
    ("causes", "most"),
    [
        (["crashed", "out_of_memory", "hang"], 5),
        (["bad_node"], 5),
        (["node_failure", "lost"], 10),
        (["bad_input", "no_space"], 1),
        (["diverged"], 3),
        (["completed", "cancelled"], 0),
    ],
)
def test_budget_of_failures_without_progress(causes: list[str], most: int) -> None:
    for cause in causes:
        restarts = [budget_after([ended(cause, 20)] * failures).may_restart for failures in range(1, 12)]
        assert restarts == [failures < most for failures in range(1, 12)]


def test_every_cause_has_a_budget_or_is_free() -> None:
    """A new cause that nobody thought about would be free, and could requeue a run for ever."""
    free = {cause for cause in Cause if budget_after([ended(cause, 20)] * 99).may_restart}
    assert free == {Cause.PREEMPTED, Cause.REQUEUED}


def test_pauses_grow() -> None:
    pauses = [budget_after([failed(None)] * failures).pause_seconds for failures in range(1, 6)]
    assert pauses == [0.0, 10.0, 30.0, 90.0, 90.0], "as docs/explanation/recovery.md says"
    assert budget_after([ended("node_failure", 20)] * 3).pause_seconds == 0.0, "other nodes need no rest"
    ran = [budget_after([failed(None), replace(failed(None), ran_seconds=ran)]).pause_seconds for ran in (4.0, 60.0)]
    assert ran == [6.0, 0.0], "ranks that trained met no fault that lasts longer than their start"


def test_used_budgets() -> None:
    assert (Budget().used, Budget().cause) == ([], None)
    history = [failed(None), ended("hang"), failed(None), ended("node_failure"), ended("lost")]
    assert budget_after(history).used == [
        "failures without progress: 3 of 5 (crashed, hang)",
        "failures without progress: 2 of 10 (node_failure, lost)",
    ]


def test_signature_has_no_numbers() -> None:
    assert signature_of("worker (pid 917) at 0x7f3A of 2 GiB") == "worker (pid #) at # of # GiB"


def test_failure_that_may_come_from_outside_has_a_signature_only_with_its_step() -> None:
    assert rank_signature("crashed", "SIGKILL", -9, "", step=7) is None, "somebody killed it"
    assert rank_signature("out_of_memory", "SIGKILL", -9, "", step=7) == "SIGKILL: "
    assert rank_signature("crashed", "SIGSEGV", -11, "", step=7) == "SIGSEGV: "
    assert rank_signature("crashed", "SIGSEGV", -11, "", step=None) is None, "it died while it started"
    assert rank_signature("crashed", None, 1, "KeyError: 7", step=None) == "1: KeyError: #"
    assert rank_signature("bad_node", None, 3, "2 GPUs of 4", step=None) is None, "another node may be bad, too"
    assert rank_signature("crashed", None, 1, "Connection closed by peer", step=7) is None
