"""Who continues a run whose first node is lost, and in which job; without Slurm."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE
from support.cluster import Command
from support.ended_attempts import TRAINING, AnsweringSlurm, EndedAttempt, EndedAttemptMaker
from support.events import (
    attempt_ended,
    cancelled,
    event,
    joined,
    recorded,
    records_in,
    resubmitted,
    train_started,
    write_events,
)

from hpc.base.files import append_json_line
from hpc.run.causes import Cause
from hpc.run.events.kinds import AttemptEnded, NodeLost
from jobs import ending, next_attempt


def take_over(survivor: EndedAttempt, *, is_member: bool = True) -> int:
    channel: Any = SimpleNamespace(
        silent_seconds=6.0,
        directive=SimpleNamespace(members=(0, 1, 2) if is_member else (0, 2)),
        report=lambda **_: None,
        first_node_has_ended=False,
    )
    return ending.take_over(survivor.node, channel, survivor.monitor)


def test_survivor_continues_the_run_in_another_job(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, slurm_command: Command, saved: list[Any]
) -> None:
    survivor = ended(joined(), node_rank=1, **TRAINING)
    slurm_command("squeue", f"echo '7|RUNNING|None|gpu[01-03]|gpu01|0|N/A|N/A|{survivor.run.script}|'")
    write_events(
        survivor.run, event("node_lost", attempt=1, node="gpu01", last_heard=1.0, detail="x"),
        file="attempt-001-node-02.jsonl",
    )  # fmt: skip
    assert take_over(survivor) == 0
    end = survivor.end
    assert time.time() - 16 < end.pop("failed_at") < time.time() - 5
    assert end == {"cause": "node_failure", "step": 30, "detail": "lost contact with gpu01", "node": "gpu01"}
    lost = recorded(survivor.node, "node_lost")[-1]
    assert (lost["node"], lost["detail"]) == ("gpu01", "lost contact with gpu01")
    assert abs(lost["last_heard"] - (lost["time"] - 6.0)) < 5
    assert saved == [(survivor.monitor.node_dir, survivor.run)]
    assert [event["excluded"] for event in recorded(survivor.node, "resubmitted")] == [["gpu01"]]
    assert slurm.asked == ["sbatch --parsable", "scancel 7"]


@pytest.mark.parametrize(
    "queue", ["7|COMPLETING|None|gpu[01-03]|gpu01|0|N/A|N/A|{}|", "8|RUNNING|None|gpu04|gpu04|0|N/A|N/A|{}|"]
)
def test_job_that_slurm_ends_is_left_to_it(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, slurm_command: Command, queue: str
) -> None:
    survivor = ended(node_rank=1)
    slurm_command("squeue", f"echo '{queue.format(survivor.run.script)}'")
    ending.record_end(survivor.node, AttemptEnded(attempt=1, cause=Cause.NODE_FAILURE))
    assert take_over(survivor) == 0
    assert slurm.asked == []


@pytest.mark.parametrize("ending_of_first_node", ["requeued", "not_continued"])
def test_agent_that_is_cut_off_itself_acts_only_if_the_head_gives_up(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, slurm_command: Command, ending_of_first_node: str
) -> None:
    survivor = ended(node_rank=1)
    slurm_command("squeue", f"echo '7|RUNNING|None|gpu[01-03]|gpu01|0|N/A|N/A|{survivor.run.script}|'")
    survivor.node.record(NodeLost(node="gpu02", last_heard=1.0, detail="lost contact with gpu02"))
    ending.record_end(survivor.node, AttemptEnded(attempt=1, cause=Cause.NODE_FAILURE))
    fields = {"job_id": "7"} if ending_of_first_node == "requeued" else {"detail": "Slurm does not answer"}
    write_events(survivor.run, event(ending_of_first_node, attempt=1, **fields), file="attempt-001-node-02.jsonl")
    assert take_over(survivor) == 0
    assert slurm.asked == ([] if ending_of_first_node == "requeued" else ["sbatch --parsable", "scancel 7"])


def test_agent_that_nobody_confirms_goes_on_after_a_while(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, slurm_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's controller may be away meanwhile: it is not ending the job then."""
    monkeypatch.setattr(ending, "_CONFIRM_SECONDS", 0.2)
    survivor = ended(node_rank=1)
    away = f"test -e {survivor.run.path}/asked || {{ touch {survivor.run.path}/asked; echo no answer >&2; exit 1; }}"
    slurm_command("squeue", away)
    assert take_over(survivor) == 0
    assert survivor.end["step"] is None, "a script has none"
    assert slurm.asked == ["sbatch --parsable", "scancel 7"]


def test_spare_lets_a_member_with_a_snapshot_go_first(
    ended: EndedAttemptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor, waited = ended(node_rank=1, local=True), []
    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waited.append))
    assert take_over(survivor, is_member=False) == LOCAL_REQUEUE_RETURN_CODE
    assert waited == [5.0]
    assert take_over(survivor) == 0, "the end is recorded, and submitit starts one attempt"
    assert waited == [5.0]


def test_cancelled_run_without_its_first_node_ends(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, slurm_command: Command
) -> None:
    survivor = ended(joined(), node_rank=1)
    write_events(survivor.run, cancelled(), file=survivor.run.cancellation.name)
    for name in ("gpu01", "gpu03"):
        survivor.node.record(NodeLost(node=name, last_heard=1.0, detail="x"))
    slurm_command("squeue", f"echo '7|RUNNING|None|gpu[01-03]|gpu01|0|N/A|N/A|{survivor.run.script}|'")
    assert take_over(survivor) == 0
    assert survivor.end["cause"] == "cancelled"
    assert slurm.asked == ["scancel 7"], "its job keeps no nodes"


@pytest.mark.parametrize(
    ("state", "is_stopping", "seconds", "asked"),
    [
        ("COMPLETING", False, 0.2, []), ("RUNNING", False, 0.2, ["scancel 7"]), ("RUNNING", True, 0.2, ["scancel 7"]),
        ("COMPLETING", True, 1e9, []),
    ],
)  # fmt: skip
def test_replaced_job_is_ended_unless_the_agent_that_replaced_it_did_so(  # noqa: PLR0917
    state: str, is_stopping: bool, seconds: float, asked: list[str], ended: EndedAttemptMaker, slurm: AnsweringSlurm,
    slurm_command: Command, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ending, "_CONFIRM_SECONDS", seconds)
    survivor = ended(node_rank=1)
    survivor.monitor.is_stopping = is_stopping
    slurm_command("squeue", f"echo '7|{state}|None|gpu[01-03]|gpu01|0|N/A|N/A|{survivor.run.script}|'")
    ending.record_end(survivor.node, AttemptEnded(attempt=1, cause=Cause.NODE_FAILURE))
    write_events(survivor.run, resubmitted(), file="attempt-001-node-02.jsonl")
    assert take_over(survivor) == 0
    assert slurm.asked == asked


@pytest.mark.parametrize(("settings", "metrics", "step"), [({}, 5, None), (TRAINING, 5, 5), (TRAINING, None, 0)])
def test_run_whose_first_node_died_before_it_claimed_an_attempt_goes_on(
    tmp_path: Path, slurm: AnsweringSlurm, settings: dict[str, Any], metrics: int | None, step: int | None
) -> None:
    survivor = EndedAttempt(tmp_path, attempt_ended(), train_started(), node_rank=1, **settings)
    if metrics:
        survivor.run.train_metrics.parent.mkdir()
        append_json_line(survivor.run.train_metrics, {"step": metrics})
    allocation = replace(survivor.node.allocation, job_id="9", node_rank=1)
    assert ending.replace_job_without_first_node(survivor.run, survivor.node.spec, allocation, "gone") == 0
    last = [each for each in records_in(survivor.run.events) if each["event"] == "attempt_ended"][-1]
    assert (last["attempt"], last["cause"], last["node"], last["detail"]) == (2, "node_failure", "gpu01", "gone")
    assert last["step"] == step
    claim = [each for each in records_in(survivor.run.events) if each["event"] == "claimed"][-1]
    assert (claim["port"], claim["secret"]) == (0, ""), "it listens nowhere"
    [new] = [each for each in records_in(survivor.run.events) if each["event"] == "resubmitted"]
    assert (new["old_job_id"], new["excluded"]) == ("9", ["gpu01"])
    assert slurm.asked == ["sbatch --parsable", "scancel 9"]


# --- both ---


def test_end_is_decided_by_the_lowest_node_rank_if_it_cannot_be_recorded(
    ended: EndedAttemptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ended()

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(ending.handover, "record_end", refuse)
    allocations = [replace(one.node.allocation, node_rank=rank) for rank in range(3)]
    found = [
        ending.record_end(replace(one.node, allocation=each), AttemptEnded(attempt=1, cause=Cause.LOST))
        for each in allocations
    ]
    assert found == [True, True, False]


def test_job_that_cannot_be_ended_is_named(
    ended: EndedAttemptMaker, slurm_command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = ended()
    slurm_command("scancel", "echo 'Access/permission denied' >&2; exit 1")
    next_attempt.end_job(stuck.node)
    assert "this job has nothing left to do but could not be cancelled: type scancel 7" in capsys.readouterr().out
