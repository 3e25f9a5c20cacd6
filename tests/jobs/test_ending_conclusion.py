"""What the first node's agent records when an attempt ends, and whether and where the run goes on; without Slurm."""

import errno
import time
from dataclasses import replace
from typing import Any, Literal

import pytest
from support.cluster import Command
from support.ended_attempts import HOSTS, RUNNING, TRAINING, AnsweringSlurm, EndedAttemptMaker
from support.events import event, joined, recorded, records_in

from hpc.base.files import append_json_line
from hpc.run.causes import Cause
from hpc.run.events.kinds import AttemptEnded, NodeLost, Resubmitted
from hpc.run.nodedir import HeldNodeDir
from hpc.run.spec import Recovery
from jobs import ending
from jobs.control.messages import Phase
from jobs.stop_request import STOP_SIGNALS


def test_run_continues_in_a_new_job_if_slurm_would_hold_the_old_one(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm
) -> None:
    stopped = ended()
    slurm.says_of_job(RUNNING, requeue_delay=120)
    stopped.stop.handle(STOP_SIGNALS[0], None)
    assert stopped.conclude() == 0
    assert (stopped.end["cause"], slurm.asked) == ("time_limit", ["sbatch --parsable", "scancel 7"])
    [resubmitted] = stopped.node.history().of(Resubmitted)
    assert (resubmitted.job_id, resubmitted.old_job_id) == ("8", "7")
    assert resubmitted.detail == "Slurm holds a requeued job for 120 s"


def test_end_that_a_full_disk_kept_back_is_recorded_before_the_next_job(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the record, the next job would take the attempt for one that runs."""
    stopped, record, errors = ended(), ending.handover.record_end, [OSError(errno.ENOSPC, "No space left on device")]

    def record_unless_full(*arguments: Any) -> bool:
        if errors:
            raise errors.pop()
        return record(*arguments)

    monkeypatch.setattr(ending.handover, "record_end", record_unless_full)
    slurm.says_of_job(RUNNING, requeue_delay=120)
    stopped.stop.handle(STOP_SIGNALS[0], None)
    assert stopped.conclude() == 0
    assert (stopped.end["cause"], slurm.asked) == ("time_limit", ["sbatch --parsable", "scancel 7"])


@pytest.mark.parametrize(("way", "asked"), [("requeue", "scontrol requeue"), ("job", "sbatch --parsable")])
def test_user_may_choose_how_the_run_continues(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, way: Literal["requeue", "job"], asked: str
) -> None:
    stopped = ended(recovery=Recovery(continue_with=way))
    slurm.says_of_job(RUNNING, requeue_delay=120 if way == "requeue" else 5)
    stopped.stop.handle(STOP_SIGNALS[0], None)
    assert stopped.conclude() == 0
    assert slurm.asked[0] == asked


PREEMPTED = "JobState=COMPLETING Restarts=1 PreemptTime=2026-01-02T00:00:00 StartTime=2026-01-01T00:00:00"


def test_job_that_slurm_requeues_itself_is_replaced(ended: EndedAttemptMaker, slurm: AnsweringSlurm) -> None:
    stopped = ended()
    slurm.says_of_job(PREEMPTED, requeue_delay=120)
    assert stopped.conclude() == 0
    assert (stopped.end["cause"], slurm.asked) == ("preempted", ["sbatch --parsable", "scancel 7"])


def test_job_that_slurm_requeues_itself_stays_if_slurm_accepts_no_new_one(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, slurm_command: Command
) -> None:
    stopped = ended()
    slurm.says_of_job(PREEMPTED, requeue_delay=120)
    refusal = "sbatch: error: AssocMaxSubmitJobLimit: Job violates accounting/QOS policy (job submit limit)"
    slurm_command("sbatch", f"echo '{refusal}' >&2; exit 1")
    assert stopped.conclude() == 0
    assert (stopped.continued(), slurm.asked) == (["requeued"], [])


def test_training_is_done_when_its_result_is_there(ended: EndedAttemptMaker, saved: list[Any]) -> None:
    done = ended(**TRAINING)
    done.coordinator.done = True
    done.coordinator.last_step = 117
    done.run.final_result.parent.mkdir(parents=True)
    done.run.final_result.touch()
    done.stop.handle(STOP_SIGNALS[1], None)
    assert done.conclude() == 0
    assert done.end == {"cause": "completed", "step": 117}
    assert not saved


def test_training_without_a_result_is_not_done(
    ended: EndedAttemptMaker, saved: list[Any], slurm: AnsweringSlurm
) -> None:
    failed = ended(**TRAINING)
    failed.coordinator.done = True
    assert failed.conclude() == 0
    assert failed.end == {"cause": "crashed", "step": 0}
    assert saved == [(failed.monitor.node_dir, failed.run)]
    [event] = recorded(failed.node, "snapshot_saved")
    assert (event["step"], 0.0 <= event["seconds"] < 30) == (40, True)
    assert slurm.asked == ["scontrol requeue"]


def test_failure_is_recorded_with_its_step(ended: EndedAttemptMaker, slurm: AnsweringSlurm) -> None:
    failed = ended(**TRAINING)
    failed.fails()
    failed.coordinator.last_step = 25
    assert failed.conclude() == 0
    expected = {"cause": "crashed", "detail": "x", "failed_at": 50.0, "node": "gpu02", "rank": 1, "signature": "s"}
    assert failed.end == {**expected, "step": 20}
    assert failed.continued() == ["requeued"]
    assert slurm.asked == ["scontrol requeue"]


@pytest.mark.parametrize(("saver", "polls"), [(1, 3), (2, 1)])
def test_node_that_saves_its_snapshot_has_more_than_a_minute(
    ended: EndedAttemptMaker, monkeypatch: pytest.MonkeyPatch, saver: int, polls: int
) -> None:
    """The end of the job would kill its agent in the middle of the copy."""
    failed = ended()
    failed.fails()
    failed.nodes.report(1, phase=Phase.ENDED)  # until the third poll
    failed.nodes.directive = replace(failed.nodes.directive, saver=saver)
    monkeypatch.setattr(ending, "_OTHERS_SECONDS", 0.0)
    failed.conclude()
    assert failed.polls == polls


@pytest.mark.parametrize(
    ("failed_step", "coordinator", "metrics", "found"),
    [
        (None, 25, {"step": 31, "attempt": 1}, 31),
        (None, 25, {"step": 5, "attempt": 1}, 25),
        (None, 25, {"step": 31}, 31),  # a script that writes the file itself
        (None, 25, {"step": 31, "attempt": 0}, 25),
        (None, 25, {"step": 31, "attempt": [1]}, 25),
        (0, 3, {"step": 2, "attempt": 1}, 0),
        (None, 0, {}, 0),
    ],
)
def test_last_step_is_the_furthest_of_this_attempt_that_is_known(
    ended: EndedAttemptMaker, failed_step: int | None, coordinator: int, metrics: dict[str, object], found: int
) -> None:
    failed = ended(**TRAINING)
    failed.fails(step=failed_step)
    failed.coordinator.last_step = coordinator
    failed.run.train_metrics.parent.mkdir()
    append_json_line(failed.run.train_metrics, metrics)
    failed.conclude()
    assert failed.end["step"] == found


@pytest.mark.parametrize(
    ("signal", "job", "cause", "exit_code", "asked"),
    [
        ("SIGTERM", RUNNING, "requeued", 0, ["scontrol requeue"]),
        ("SIGTERM", "JobState=COMPLETING Restarts=1 Reason=None", "requeued", 0, []),
        ("SIGTERM", "JobState=COMPLETING Restarts=0 Reason=None", "cancelled", 1, []),
        (None, "JobState=NODE_FAIL Restarts=0 Reason=None", "node_failure", 0, []),
    ],
)
def test_slurm_says_why_an_attempt_ended_and_may_requeue_it_itself(  # noqa: PLR0917
    ended: EndedAttemptMaker,
    slurm: AnsweringSlurm,
    signal: str | None,
    job: str,
    cause: str,
    exit_code: int,
    asked: list[str],
) -> None:
    stopped = ended()
    slurm.says_of_job(job)
    if signal:
        stopped.stop.handle(next(each for each in STOP_SIGNALS if each.name == signal), None)
    assert stopped.conclude() == exit_code
    assert (stopped.end["cause"], slurm.asked) == (cause, asked)


def test_slurm_that_does_not_answer_does_not_hide_the_cause(
    ended: EndedAttemptMaker, slurm_command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ended()
    failed.fails(Cause.HANG)
    slurm_command("scontrol", 'case "$*" in *show*) echo away >&2; exit 1;; esac')
    assert failed.conclude() == 0
    assert failed.end["cause"] == "hang"
    assert "Slurm does not report the state of this job: away" in capsys.readouterr().out


def test_preemption_that_slurm_has_written_into_the_log_alone(ended: EndedAttemptMaker) -> None:
    """With GraceTime=0."""
    preempted = ended()
    preempted.fails()
    preempted.run.logs.mkdir()
    ended = "slurmstepd-gpu01: error: *** STEP 7.0 ON gpu01 CANCELLED AT 2001-01-01T00:00:00 DUE TO PREEMPTION ***\n"
    (preempted.run.logs / "7_0_log.out").write_text(f"torchrelay: start 0 of job 7\n{ended}")
    assert preempted.conclude() == 0
    assert preempted.end["cause"] == "preempted"


def test_job_that_is_cancelled_while_slurm_preempts_it_stays_cancelled(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm
) -> None:
    cancelled = ended()
    cancelled.fails()
    cancelled.run.logs.mkdir()
    times = "StartTime=2026-11-29T10:00 PreemptTime=2026-11-29T10:05"
    slurm.says_of_job(f"JobState=COMPLETING Restarts=0 Reason=None {times}")
    line = "slurmstepd-gpu01: error: *** {} ON gpu01 CANCELLED AT 2026-11-29T10:05:00 ***\n"
    log = f"torchrelay: start 0 of job 7\n{line.format('STEP 7.0')}{line.format('JOB 7')}"
    (cancelled.run.logs / "7_0_log.out").write_text(log)
    assert cancelled.conclude() == 1
    assert cancelled.end["cause"] == "cancelled"
    assert slurm.asked == []


def test_end_that_others_have_recorded_stays(ended: EndedAttemptMaker, slurm: AnsweringSlurm) -> None:
    late = ended()
    assert ending.record_end(late.node, AttemptEnded(attempt=1, cause=Cause.NODE_FAILURE))
    late.fails()
    assert late.conclude() == 1
    assert late.end["cause"] == "node_failure"
    assert slurm.asked == []


def test_job_that_a_successor_has_ended_is_not_cancelled(ended: EndedAttemptMaker, slurm: AnsweringSlurm) -> None:
    late = ended(event("resubmitted", attempt=1, job_id="8", old_job_id="7", excluded=[]))
    slurm.says_of_job("JobState=COMPLETING Restarts=0 Reason=None")
    assert late.conclude() == 0
    assert late.end["cause"] == "requeued"
    assert slurm.asked == []


@pytest.mark.parametrize("how", ["lost", "stuck", "silent", "absent"])
def test_job_with_a_node_that_does_not_answer_is_replaced(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, how: str
) -> None:
    lost = ended()
    lost.fails(Cause.NODE_FAILURE)
    if how == "lost":
        lost.coordinator.lost = {1: time.time() - 890}
    elif how == "stuck":
        lost.coordinator.stuck = {1}
    elif how == "absent":
        lost.nodes.forget(1)
    else:
        lost.nodes.report(1, phase=Phase.RUNNING)
        lost.nodes.silent[1] = 6.0
    assert lost.conclude() == 0
    assert lost.continued() == ["resubmitted"]
    assert [event["excluded"] for event in recorded(lost.node, "resubmitted")] == [["gpu02"]]
    assert slurm.asked == ["sbatch --parsable", "scancel 7"]


def test_job_whose_node_was_lost_long_ago_is_requeued(ended: EndedAttemptMaker, slurm: AnsweringSlurm) -> None:
    """Slurm knows by now, or the node has come back."""
    lost = ended()
    lost.fails(Cause.HANG)
    lost.coordinator.lost = {1: time.time() - 910}
    assert lost.conclude() == 0
    assert slurm.asked == ["scontrol requeue"]


def test_requeued_job_avoids_bad_nodes(ended: EndedAttemptMaker, slurm: AnsweringSlurm) -> None:
    bad = ended()
    bad.fails(Cause.BAD_NODE, node="gpu03")
    bad.coordinator.bad_nodes = {2}
    assert bad.conclude() == 0
    assert bad.continued() == ["requeued", "excluded"]
    assert [event["excluded"] for event in recorded(bad.node, "excluded")] == [["gpu03"]]
    assert slurm.asked == ["scontrol requeue", "scontrol update"]


def test_ranks_of_the_other_nodes_end_first(ended: EndedAttemptMaker) -> None:
    waiting = ended()
    waiting.nodes.report(1, phase=Phase.RUNNING)
    assert waiting.conclude() == 0
    assert waiting.polls == 3


def test_ranks_that_do_not_end_are_not_waited_for_for_ever(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_OTHERS_SECONDS", 0.1)
    waiting = ended()
    waiting.nodes.report(2, phase=Phase.ENDED)
    assert waiting.conclude() == 0
    assert waiting.polls >= 1
    assert slurm.asked == ["scontrol requeue"], "its node is not lost"


def test_snapshot_that_cannot_be_saved_stays_in_memory(
    ended: EndedAttemptMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ended()

    def refuse(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(ending, "save_newest_as_checkpoint", refuse)
    failed.fails()
    assert failed.conclude() == 0
    assert failed.node.has_unsaved_snapshot.is_set()
    assert "could not be saved and stays in the memory of gpu01: no space" in capsys.readouterr().out
    assert not recorded(failed.node, "snapshot_saved")


# --- an agent that has failed ---


def test_agent_that_was_asked_to_stop_has_not_failed(ended: EndedAttemptMaker, slurm: AnsweringSlurm) -> None:
    stopped = ended()
    assert ending.conclude_failed_agent(stopped.node, Cause.BAD_NODE, "x", "SIGTERM") == 0
    assert stopped.end["cause"] == "requeued"
    assert slurm.asked == ["scontrol requeue"]


@pytest.mark.parametrize(
    ("cause", "with_joined", "lost_first", "continued", "excluded"),
    [
        (Cause.LOST, HOSTS, False, ["requeued", "excluded"], ["gpu01"]),
        (Cause.LOST, ("gpu01", "gpu03"), False, ["resubmitted"], ["gpu02", "gpu01"]),
        (Cause.CRASHED, ("gpu01",), False, ["requeued"], None),
        (Cause.CRASHED, HOSTS, True, ["resubmitted"], ["gpu03"]),
        (Cause.LOST, ("gpu02", "gpu03"), False, ["requeued", "excluded"], ["gpu01"]),
    ],
    ids=[
        "killed agents",
        "node that never joined",
        "defect",
        "lost node",
        "first node that never joined",
    ],
)
def test_nodes_that_the_next_job_avoids_after_a_failed_agent(
    ended: EndedAttemptMaker, cause: Cause, with_joined: tuple[str, ...], lost_first: bool, continued: list[str],
    excluded: list[str] | None,
) -> None:  # fmt: skip
    failed = ended(*(joined(node=name, node_rank=HOSTS.index(name)) for name in with_joined))
    if lost_first:
        failed.node.record(NodeLost(node="gpu03", last_heard=1.0, detail="lost contact with gpu03"))
    assert ending.conclude_failed_agent(failed.node, cause, "x") == 0
    assert failed.continued() == continued
    avoided = [event["excluded"] for event in records_in(failed.run.events) if "excluded" in event]
    assert avoided == ([excluded] if excluded else [])
    assert failed.end.get("signature") == (None if cause is Cause.LOST else "x")
    assert failed.end["step"] is None, "a script has none"


@pytest.mark.parametrize("is_done", [False, True])
def test_snapshots_that_a_failed_agent_leaves_are_saved_unless_the_run_is_done(
    ended: EndedAttemptMaker, saved: list[Any], is_done: bool
) -> None:
    failed = ended(**TRAINING)
    if is_done:
        failed.run.final_result.parent.mkdir(parents=True)
        failed.run.final_result.touch()
    memory = HeldNodeDir(failed.run.path, 0)
    assert ending.conclude_failed_agent(failed.node, Cause.CRASHED, "x") == 0
    memory.close(remove=True)
    assert failed.end["cause"] == ("completed" if is_done else "crashed")
    assert saved == ([] if is_done else [(memory.files, failed.run)])
