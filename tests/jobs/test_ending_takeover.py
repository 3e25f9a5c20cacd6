"""Who continues a run whose first node is lost, and in which job; without Slurm."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE
from support.cluster import Command
from support.ended_attempts import AnsweringSlurm, EndedAttempt, EndedAttemptMaker

from hpc.run.causes import Cause
from hpc.run.events.kinds import AttemptEnded
from jobs import ending, node_attempt


def take_over(survivor: EndedAttempt, *, is_member: bool = True) -> int:
    channel: Any = SimpleNamespace(
        silent_seconds=6.0,
        directive=SimpleNamespace(members=(0, 1, 2) if is_member else (0, 2)),
        report=lambda **_: None,
        first_node_has_ended=False,
    )
    return ending.take_over(survivor.node, channel, survivor.monitor)


def test_agent_that_nobody_confirms_goes_on_after_a_while_and_sends_heartbeats(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, slurm_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's controller may be away meanwhile: it is not ending the job then. sbatch answers after a heartbeat."""
    monkeypatch.setattr(ending, "_CONFIRM_SECONDS", 0.2)
    monkeypatch.setattr(node_attempt, "_ALIVE_SECONDS", 0.05)
    survivor = ended(node_rank=1)
    away = f"test -e {survivor.run.path}/asked || {{ touch {survivor.run.path}/asked; echo no answer >&2; exit 1; }}"
    slurm_command("squeue", away)
    alive, submitted = survivor.run.alive, survivor.run.path / "submitted"
    slurm_command("sbatch", f"touch {submitted}; until [ {alive} -nt {submitted} ]; do sleep 0.1; done; echo 8")
    assert take_over(survivor) == 0
    assert survivor.end["step"] is None, "a script has none"
    assert (survivor.continued(), slurm.asked) == (["resubmitted"], ["scancel 7"])


def test_spare_lets_a_member_with_a_snapshot_go_first(
    ended: EndedAttemptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor, waited = ended(node_rank=1, local=True), []
    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waited.append))
    assert take_over(survivor, is_member=False) == LOCAL_REQUEUE_RETURN_CODE
    assert waited == [5.0]
    assert take_over(survivor) == 0, "the end is recorded, and submitit starts one attempt"
    assert waited == [5.0]


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
