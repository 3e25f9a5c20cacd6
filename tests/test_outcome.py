"""The causes of an attempt's end, as tables."""

from dataclasses import replace

import pytest

from hpc.outcome import Cause, Ending, cause_of, goes_on, must_requeue
from hpc.slurm import JobState

QUIET = Ending(
    finished=False, cancelled=False, signal=None, job_state=JobState.RUNNING, preempted=False,
    failures=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "cause", "requeue"),
    [
        ({"finished": True, "signal": "SIGTERM", "preempted": True}, Cause.COMPLETED, False),
        ({"cancelled": True, "signal": "SIGTERM"}, Cause.CANCELLED, False),
        ({"job_state": JobState.CANCELLED, "signal": "SIGTERM"}, Cause.CANCELLED, False),
        ({"preempted": True, "signal": "SIGTERM"}, Cause.PREEMPTED, True),
        ({"preempted": True, "signal": "SIGTERM", "job_state": JobState.PENDING}, Cause.PREEMPTED, False),
        ({"preempted": True, "signal": "SIGTERM", "job_state": JobState.CANCELLED}, Cause.PREEMPTED, True),
        ({"signal": "SIGUSR2"}, Cause.TIME_LIMIT, True),
        ({"signal": "SIGTERM", "job_state": JobState.TIMEOUT}, Cause.TIME_LIMIT, True),
        ({"signal": "SIGTERM", "job_state": JobState.PENDING}, Cause.REQUEUED, False),
        ({"signal": "SIGTERM"}, Cause.REQUEUED, True),
        ({"signal": "SIGTERM", "job_state": JobState.NODE_FAIL}, Cause.NODE_FAILURE, False),
        ({}, Cause.CRASHED, True),
        ({"failures": 2}, Cause.CRASHED, False),
    ],
)
def test_cause_and_requeue(changes: dict[str, object], cause: Cause, requeue: bool) -> None:
    ending = replace(QUIET, **changes)  # type: ignore[arg-type]
    assert cause_of(ending) is cause
    assert must_requeue(cause, ending) is requeue


def test_only_crashes_are_counted() -> None:
    for cause in Cause:
        if cause is not Cause.CRASHED:
            assert goes_on(cause, failures=0) == goes_on(cause, failures=99)
    assert goes_on(Cause.CRASHED, failures=1)
    assert not goes_on(Cause.CRASHED, failures=2)
