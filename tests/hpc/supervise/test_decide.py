"""What the supervisor decides, as a table: what is known of a run, and the one action."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc.run.causes import Cause, JobState
from hpc.run.events.attempts import Attempt
from hpc.run.events.history import History
from hpc.run.events.kinds import Cancelled, Event, Refused, Resubmitting, Scancelled, Submitted
from hpc.run.rundir import RunDir
from hpc.slurm.squeue import SlurmJob
from hpc.supervise.decide import NEVER_SUBMITTED, Action, Decision, decide
from hpc.supervise.observe import RunObservation

NOW = 1_000_000.0


def job(state: JobState, job_id: str = "7", **fields: Any) -> SlurmJob:
    return SlurmJob(job_id=job_id, state=state, **{"reason": "None", "nodes": "", "command": "submit.sbatch", **fields})


def attempt(cause: Cause | None = None, **fields: Any) -> Attempt:
    """One that started a quarter of an hour ago, and ended just now if it has a cause."""
    usual = {
        "attempt": 1, "job_id": "7", "restart": 0, "secret": "n", "port": 1, "nodes": ("gpu01", "gpu02"),
        "started": NOW - 900, "cause": cause, "ended": NOW - 1 if cause else None, "last_step": 50 if cause else None,
    }  # fmt: skip
    return Attempt(**{**usual, **fields})


RUNNING, ENDING = job(JobState.RUNNING, started=NOW - 900), job(JobState.ENDING)
BEGIN_TIME = job(JobState.PENDING, reason="BeginTime", restarts=1, eligible=NOW + 118)
HELD = job(JobState.PENDING, reason="launch failed requeued held", restarts=1)
CRASHES = [attempt(Cause.CRASHED, attempt=n, last_step=0, ended=NOW - 10, signature="1: x") for n in (1, 2)]
DEATHS = [attempt(Cause.NODE_FAILURE, attempt=n, last_step=0, ended=NOW - 10) for n in (1, 2, 3)]

TABLE: list[tuple[str, dict[str, Any], Action, str]] = [
    # A run that is over is left alone.
    ("complete, and another job waits", {"complete": True, "jobs": [BEGIN_TIME]}, Action.CANCEL, "complete"),
    ("cancelled, and still runs", {"cancelled": True, "jobs": [RUNNING]}, Action.CANCEL, "cancelled"),
    ("cancelled, and requeued by Slurm", {"cancelled": True, "jobs": [BEGIN_TIME]}, Action.CANCEL, "cancelled"),
    ("bad input, and its job waits", {"jobs": [HELD], "attempts": [attempt(Cause.BAD_INPUT)]},
     Action.CANCEL, "its job waits"),
    ("cancelled, its job is ending", {"cancelled": True, "jobs": [ENDING]}, Action.KEEP, "cancelled"),
    ("the same failure twice", {"attempts": CRASHES}, Action.KEEP, "given up: crashed"),
    # Jobs that need nothing.
    ("lost its first node before it started",
     {"jobs": [job(JobState.RUNNING, started=NOW - 30, batch_host="gpu01")], "without_first_node": frozenset({"7"})},
     Action.RESUBMIT, "gpu01, its first node, was lost"),
    ("has just claimed; the last heartbeat is that of the attempt before",
     {"jobs": [RUNNING], "attempts": [attempt(Cause.LOST), attempt(attempt=2, started=NOW - 3)],
      "heartbeat_at": NOW - 300}, Action.KEEP, "is running"),
    ("in no known state", {"jobs": [job(JobState.UNKNOWN)]}, Action.KEEP, "unknown state"),
    # Slurm's delays and holds.
    ("requeued", {"jobs": [BEGIN_TIME], "attempts": [attempt(Cause.PREEMPTED)]}, Action.START_NOW, "requeued"),
    ("to begin later, as its user wants", {"jobs": [replace(BEGIN_TIME, restarts=0)]}, Action.KEEP, "is pending"),
    ("failed for the first time", {"jobs": [BEGIN_TIME], "attempts": DEATHS[:1]}, Action.START_NOW, "requeued"),
    ("failed three times", {"jobs": [BEGIN_TIME], "attempts": DEATHS}, Action.KEEP, "next attempt in 50 s"),
    ("could not be started", {"jobs": [HELD]}, Action.RELEASE, "could not start"),
    ("could not be started four times after preemptions",
     {"jobs": [replace(HELD, restarts=9)], "attempts": [attempt(restart=4)]}, Action.RELEASE, "could not start"),
    ("could not be started five times after preemptions",
     {"jobs": [replace(HELD, restarts=10)], "attempts": [attempt(restart=4)]}, Action.KEEP,
     "5 times to start job 7: type scontrol release 7"),
    ("suspended", {"jobs": [job(JobState.SUSPENDED)], "attempts": [attempt()]}, Action.KEEP, "is suspended"),
    ("held by its user", {"jobs": [job(JobState.PENDING, reason="JobHeldUser")]}, Action.KEEP, "JobHeldUser"),
    ("keeps away from too many nodes", {"jobs": [job(JobState.PENDING, reason="ReqNodeNotAvail")],
      "excluded": ["gpu03", "gpu04"], "excludable": ["gpu03"]}, Action.ALLOW_NODES,
     "too few nodes are left without gpu04"),
    ("keeps away from what it can", {"jobs": [job(JobState.PENDING, reason="Priority")],
      "excluded": ["gpu03"], "excludable": ["gpu03", "gpu02"]}, Action.KEEP, "is pending (Priority)"),
    # Nothing works in the job's nodes.
    ("silent, and its node's clock was ahead", {"jobs": [RUNNING], "attempts": [attempt(started=NOW + 500)],
      "heartbeat_at": NOW - 75}, Action.RESUBMIT, "75 s"),
    ("a restart whose agents never came", {"jobs": [replace(RUNNING, restarts=1)], "attempts": [attempt(Cause.LOST)]},
     Action.RESUBMIT, "not started"),
    ("ended for good, but not its job", {"jobs": [RUNNING], "attempts": [attempt(Cause.BAD_INPUT, ended=NOW - 101)]},
     Action.CANCEL, "its job still runs"),
    ("an old listing of a job that began anew",
     {"jobs": [RUNNING], "attempts": [attempt(restart=1)], "heartbeat_at": NOW},
     Action.KEEP, "is starting"),
    ("an old one is ending, and the new one is silent", {"jobs": [ENDING, job(JobState.RUNNING, "8")],
      "attempts": [attempt(attempt=2, job_id="8")]}, Action.RESUBMIT, "no heartbeat"),
    ("ends before it has claimed", {"jobs": [ENDING]}, Action.KEEP, "job 7 is ending"),
    ("ends for hours without a word", {"jobs": [ENDING], "attempts": [attempt()], "heartbeat_at": NOW - 700},
     Action.RESUBMIT, "gone"),
    ("works, and another one waits", {"jobs": [RUNNING, job(JobState.PENDING, "8")], "attempts": [attempt()],
      "heartbeat_at": NOW}, Action.KEEP, "job 7 is running"),
    ("its place is taken", {"jobs": [RUNNING, job(JobState.PENDING, "8")], "attempts": [attempt(Cause.LOST)]},
     Action.CANCEL, "replaced it"),
    ("its successor runs", {"jobs": [RUNNING, job(JobState.RUNNING, "8")],
      "attempts": [attempt(Cause.LOST), attempt(attempt=2, job_id="8")]}, Action.CANCEL, "replaced it"),
    # There is no job.
    ("gone while it waited", {"attempts": [attempt(Cause.CRASHED)], "handed_over_at": NOW - 300},
     Action.KEEP, "hpc resume"),
    ("never began", {}, Action.KEEP, "hpc resume"),
    ("never reached Slurm", {"submitted": False}, Action.KEEP, NEVER_SUBMITTED),
    ("reached Slurm, and its submission was not recorded", {"submitted": False, "jobs": [job(JobState.FAILED)]},
     Action.KEEP, "its job is gone (failed), and its agents had not started: see the job's log"),
    ("resumed after it had failed, its job waits",
     {"attempts": [CRASHES[0], attempt(Cause.CRASHED, attempt=2, last_step=0, signature="1: x", resumed=NOW - 5)],
      "jobs": [job(JobState.PENDING)]}, Action.KEEP, "job 7 is pending"),
    ("resumed after hpc cancel, and failed again",
     {"attempts": [attempt(Cause.CANCELLED, resumed=NOW - 500), attempt(Cause.CRASHED, attempt=2, ended=NOW - 300)]},
     Action.RESUBMIT, "gone"),
    ("its node failed before it began", {"jobs": [job(JobState.NODE_FAIL)]}, Action.REQUEUE, "a node failed"),
    ("ran out of time without a word", {"jobs": [job(JobState.TIMEOUT)], "attempts": [attempt()]},
     Action.RESUBMIT, "timeout"),
    ("scancelled while it waited, for good", {"scancelled": True, "attempts": [attempt(Cause.PREEMPTED)]},
     Action.KEEP, "scancel"),
    ("scancelled by who could not submit the next one",
     {"last_job_state": JobState.CANCELLED, "handover_unfinished": True,
      "attempts": [attempt(Cause.LOST)]}, Action.RESUBMIT, "cancelled"),
    ("squeue leaves it out", {"last_job_state": JobState.RUNNING, "attempts": [attempt()]},
     Action.KEEP, "accounting does"),
    ("its jobs end before they begin",
     {"attempts": [attempt(Cause.LOST)], "last_job_state": JobState.FAILED, "queued_jobs": 5},
     Action.KEEP, "ended 5 times before it started"),
    ("its job ended before it began",
     {"attempts": [attempt(Cause.LOST, ended=NOW - 20)], "last_job_state": JobState.FAILED,
      "queued_jobs": 1, "handed_over_at": NOW - 10}, Action.KEEP, "next attempt in 20 s"),
    ("its node failed before it began, accounting says", {"last_job_state": JobState.NODE_FAIL},
     Action.RESUBMIT, "node_fail"),
    ("scancelled while it waited, accounting says", {"last_job_state": JobState.CANCELLED,
      "attempts": [attempt(Cause.PREEMPTED)], "handed_over_at": NOW - 900}, Action.RECORD, "scancel"),
]  # fmt: skip


EVENTS: dict[str, Event] = {
    "submitted": Submitted(job_id="7"), "cancelled": Cancelled(), "scancelled": Scancelled(job_id="7"),
    "refused": Refused(job_id="7", restart=0, detail="gpu01 has no interface ib7"),
    "handover_unfinished": Resubmitting(attempt=1, host="login", pid=1),
}  # fmt: skip


def view(**known: Any) -> RunObservation:
    """What is known; the last job is the last that squeue lists."""
    events = [event for name, event in EVENTS.items() if known.pop(name, name == "submitted")]
    history = History(events, complete=known.pop("complete", False))
    vars(history)["attempts"] = known.pop("attempts", [])  # in place of those of the events
    listed = {"last_job_state": known["jobs"][-1].state} if known.get("jobs") else {}
    return RunObservation(run=RunDir(Path("run")), history=history, now=NOW, **{**listed, **known})


@pytest.mark.parametrize(("known", "action", "reason"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_decision(known: dict[str, Any], action: Action, reason: str) -> None:
    decision = decide(view(**known))
    assert decision.action is action, decision.reason
    assert reason in decision.reason
    jobs = known.get("jobs", [])
    if action is Action.RESUBMIT:
        assert decision.job_id == next((one.job_id for one in jobs[::-1] if one.state is JobState.RUNNING), None)
    elif action not in {Action.KEEP, Action.RECORD}:
        assert decision.job_id == jobs[0].job_id
    else:
        assert decision.job_id is None
    assert decision.cause is None or action in {Action.RESUBMIT, Action.REQUEUE, Action.RECORD}


KEEP, RESUBMIT = Action.KEEP, Action.RESUBMIT
LIMITS: list[tuple[str, float, Callable[[float], dict[str, Any]], tuple[Action, Action, Action]]] = [
    ("no heartbeat", 60, lambda s: {"jobs": [RUNNING], "attempts": [attempt()], "heartbeat_at": NOW - s},
     (KEEP, RESUBMIT, RESUBMIT)),
    ("no claim", 600, lambda s: {"jobs": [job(JobState.RUNNING, started=NOW - s)]}, (KEEP, RESUBMIT, RESUBMIT)),
    ("no claim, and no heartbeat of an agent that waits for space", 60,
     lambda s: {"jobs": [RUNNING], "attempts": [attempt(Cause.REQUEUED, job_id="6")], "heartbeat_at": NOW - s},
     (KEEP, RESUBMIT, RESUBMIT)),
    ("no claim, and another job trains", 600,
     lambda s: {"jobs": [job(JobState.RUNNING, started=NOW - s), job(JobState.RUNNING, "8")],
                "attempts": [attempt(job_id="8")], "heartbeat_at": NOW}, (KEEP, KEEP, Action.CANCEL)),
    ("its job is ending", 600, lambda s: {"jobs": [ENDING], "attempts": [attempt(Cause.LOST, ended=NOW - s)]},
     (KEEP, RESUBMIT, RESUBMIT)),
    ("its attempt has ended", 100, lambda s: {"jobs": [RUNNING], "attempts": [attempt(Cause.LOST, ended=NOW - s)]},
     (KEEP, RESUBMIT, RESUBMIT)),
    ("its attempt has ended, and its agents ask Slurm", 900,
     lambda s: {"jobs": [RUNNING], "attempts": [attempt(Cause.LOST, ended=NOW - s)], "heartbeat_at": NOW},
     (KEEP, RESUBMIT, RESUBMIT)),
    ("its job is gone", 60, lambda s: {"attempts": [attempt()], "heartbeat_at": NOW - s}, (KEEP, RESUBMIT, RESUBMIT)),
    ("another process submits the next job", 100,
     lambda s: {"attempts": [attempt()], "handover_deadline": NOW + 100 - s}, (KEEP, RESUBMIT, RESUBMIT)),
    ("it is complete", 100, lambda s: {"complete": True, "jobs": [RUNNING], "heartbeat_at": NOW - s},
     (KEEP, Action.CANCEL, Action.CANCEL)),
    ("Slurm's delay is short", 30, lambda s: {"jobs": [replace(BEGIN_TIME, eligible=NOW + s)]},
     (KEEP, KEEP, Action.START_NOW)),
    ("Slurm's delay is long", 900, lambda s: {"jobs": [replace(BEGIN_TIME, eligible=NOW + s)]},
     (Action.START_NOW, KEEP, KEEP)),
    ("after the second failure", 30,
     lambda s: {"jobs": [BEGIN_TIME], "attempts": [replace(death, ended=NOW - s) for death in DEATHS[:2]]},
     (KEEP, Action.START_NOW, Action.START_NOW)),
]  # fmt: skip


@pytest.mark.parametrize(("limit", "known", "actions"), [row[1:] for row in LIMITS], ids=[row[0] for row in LIMITS])
def test_limit_of_time(
    limit: float, known: Callable[[float], dict[str, Any]], actions: tuple[Action, Action, Action]
) -> None:
    seconds = (limit - 0.25, limit, limit + 0.25)
    assert tuple(decide(view(**known(each))).action for each in seconds) == actions


@pytest.mark.parametrize(("fact", "cause"), [("complete", Cause.COMPLETED), ("cancelled", Cause.CANCELLED)])
def test_run_that_is_over_says_so_in_one_word(fact: str, cause: Cause) -> None:
    for known in ({fact: True}, {"attempts": [attempt(cause)]}):
        assert decide(view(**known)).reason == cause.value


@pytest.mark.parametrize(
    ("jobs", "state", "cause"),
    [([RUNNING], JobState.RUNNING, Cause.LOST), ([], JobState.UNKNOWN, Cause.LOST),
     ([job(JobState.TIMEOUT)], JobState.TIMEOUT, Cause.TIME_LIMIT), ([], JobState.PREEMPTED, Cause.PREEMPTED),
     ([job(JobState.NODE_FAIL)], JobState.NODE_FAIL, Cause.NODE_FAILURE),
     ([], JobState.NODE_FAIL, Cause.NODE_FAILURE),
     ([job(JobState.CANCELLED)], JobState.CANCELLED, Cause.CANCELLED)],
)  # fmt: skip
def test_cause_of_an_end_that_was_not_recorded(jobs: Sequence[SlurmJob], state: JobState, cause: Cause) -> None:
    assert decide(view(jobs=jobs, last_job_state=state, attempts=[attempt()])).cause is cause


def test_an_end_that_is_known_is_not_recorded_again() -> None:
    decision = decide(view(attempts=[attempt(Cause.CRASHED)]))
    assert decision == Decision(action=Action.RESUBMIT, reason="its job is gone", cause=None)
    scancelled = decide(view(jobs=[job(JobState.CANCELLED)], attempts=[attempt(Cause.PREEMPTED)]))
    assert (scancelled.action, scancelled.cause) == (Action.RECORD, None)


def test_job_that_refused_to_start_says_why() -> None:
    known = view(jobs=[job(JobState.FAILED)], last_job_state=JobState.FAILED, refused=True)
    decision = decide(known)
    assert decision.state == "failed"
    assert "its job started nothing: gpu01 has no interface ib7: correct that" in decision.reason


def test_job_that_never_started_is_no_cause_of_the_end_of_the_last_attempt() -> None:
    decision = decide(view(jobs=[replace(RUNNING, restarts=1)], attempts=[attempt()]))
    assert (decision.action, decision.cause) == (Action.RESUBMIT, None)


@pytest.mark.parametrize(
    ("known", "state", "is_final"),
    [({"complete": True}, "completed", True), ({"attempts": [attempt(Cause.COMPLETED)]}, "completed", True),
     ({"attempts": CRASHES}, "failed", True), ({"attempts": [attempt(Cause.CANCELLED)]}, "cancelled", False),
     ({"cancelled": True}, "cancelled", False),
     ({"scancelled": True, "attempts": [attempt(Cause.PREEMPTED)]}, "cancelled", False),
     ({"jobs": [job(JobState.CANCELLED)]}, "cancelled", False),
     ({"attempts": [attempt()], "heartbeat_at": NOW - 9}, "pending", False),
     ({"attempts": [attempt()], "heartbeat_at": NOW - 500}, "pending", False),
     ({"attempts": [attempt()], "heartbeat_at": NOW - 700}, "failed", False),
     ({"attempts": [attempt(Cause.LOST, ended=NOW - 700)], "handover_deadline": NOW + 9}, "pending", False),
     ({"attempts": [attempt(Cause.LOST)], "handed_over_at": NOW - 300}, "failed", False),
     ({"attempts": [attempt(Cause.LOST, ended=NOW - 600)]}, "pending", False),
     ({"attempts": [attempt(Cause.LOST, ended=NOW - 600.25)]}, "failed", False),
     ({"jobs": [job(JobState.FAILED)]}, "failed", False), ({"submitted": False}, "failed", False),
     ({"jobs": [replace(HELD, restarts=5)]}, "failed", True),
     ({"jobs": [job(JobState.NODE_FAIL, restarts=5)]}, "failed", True)],
)  # fmt: skip
def test_state_of_a_run_without_a_job(known: dict[str, Any], state: str, is_final: bool) -> None:
    decision = decide(view(**known))
    assert (decision.state, decision.is_final) == (state, is_final), decision.reason
