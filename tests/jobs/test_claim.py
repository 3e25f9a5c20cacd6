"""Who starts an attempt, with Slurm's commands as shell scripts that answer as Slurm did."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster import Command
from support.events import attempt_ended, cancelled, claimed, recorded_run, records_in, write_events

from hpc.base.errors import TorchrelayError
from hpc.run.events import ledger
from hpc.run.events.attempts import attempts_of
from hpc.run.events.history import History
from hpc.run.rundir import RunDir
from hpc.run.spec import Cluster, RunSpec
from jobs import claim, node_attempt
from jobs.claim import FirstNodeLostError
from jobs.ending import replace_job_without_first_node
from jobs.node_attempt import NodeAllocation

AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def run_with_a_lost_attempt(tmp_path: Path, cluster: Cluster, began: float) -> RunDir:
    """A run whose only attempt has no end."""
    run = recorded_run(tmp_path / "r", cluster=cluster)
    write_events(run, claimed(began), file="attempt-001-node-00.jsonl")
    return run


def allocation(cluster: str, job_id: str = "8") -> NodeAllocation:
    return NodeAllocation(cluster=cluster, job_id=job_id, restart=0, node_rank=0, hostnames=("gpu01",), cpus=1)


def test_agents_that_join_read_no_files_of_other_nodes(tmp_path: Path) -> None:
    """In a job of a thousand nodes, a thousand agents would read a thousand files for each attempt, at every start."""
    run = run_with_a_lost_attempt(tmp_path, "local", time.time())
    for rank in (1, 10, 100):
        (run.events / f"attempt-001-node-{rank:02d}.jsonl").mkdir()  # to read it is an error
    joined = claim.join(run, replace(allocation("local", "7"), node_rank=2), lambda: False, 0.0)
    assert joined is not None
    assert (joined.attempt, joined.port) == (1, 1)


def test_heartbeat_of_the_attempt_before_is_none_of_a_lost_one(tmp_path: Path) -> None:
    began = time.time() - 3600
    run = run_with_a_lost_attempt(tmp_path, "local", began)
    run.alive.touch()
    os.utime(run.alive, (began - 3000,) * 2)
    claim.claim_next(run, allocation("local"), 1, "m")
    assert attempts_of(ledger.read(run.events))[0].ended == began


def test_controller_that_stays_away_is_an_error(
    tmp_path: Path, slurm_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time() - 3600)
    slurm_command("squeue", AWAY)
    monkeypatch.setattr(claim, "_CONTROLLER_SECONDS", 0.0)
    with pytest.raises(TorchrelayError, match="Unable to contact"):
        claim.claim_next(run, allocation("slurm"), 1, "m")


def test_job_of_the_run_that_runs_is_not_waited_for(tmp_path: Path, slurm_command: Command) -> None:
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time() - 3600)
    slurm_command("squeue", f"echo '7|RUNNING|None|gpu01|gpu01|0|N/A|N/A|{run.script}|'")
    with pytest.raises(TorchrelayError, match="is running in job 7"):
        claim.claim_next(run, allocation("slurm"), 1, "m")


@pytest.mark.parametrize(
    ("first", "then"), [("COMPLETING", "PENDING"), ("SUSPENDED", "COMPLETED"), ("NEW_WORD", "FAILED")]
)
def test_job_of_the_run_that_does_not_run_is_waited_for_until_it_has_ended(
    tmp_path: Path, slurm_command: Command, monkeypatch: pytest.MonkeyPatch, first: str, then: str
) -> None:
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time() - 3600)
    monkeypatch.setattr(claim, "_POLL_SECONDS", 0.01)
    slurm_command("sinfo", "echo 'gpu01|idle'")
    job = f"|None|gpu01|gpu01|0|N/A|N/A|{run.script}|"
    asked = f"{tmp_path}/asked"
    slurm_command(
        "squeue", f"echo >>{asked}; [ $(wc -l <{asked}) -lt 3 ] && echo '7|{first}{job}' || echo '7|{then}{job}'"
    )
    assert claim.claim_next(run, allocation("slurm"), 1, "m").attempt == 2
    assert len((tmp_path / "asked").read_text()) == 3


@pytest.mark.parametrize("state", ["COMPLETING", "NEW_WORD"])
def test_job_of_the_run_that_does_not_end_is_an_error(
    tmp_path: Path, slurm_command: Command, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time() - 3600)
    monkeypatch.setattr(claim, "_ENDING_SECONDS", 0.0)
    slurm_command("squeue", f"echo '7|{state}|None|gpu01|gpu01|0|N/A|N/A|{run.script}|'")
    with pytest.raises(TorchrelayError, match="run r is running in job 7: wait for it, or type hpc cancel r"):
        claim.claim_next(run, allocation("slurm"), 1, "m")


def test_requeued_job_claims_without_asking_slurm_for_itself(tmp_path: Path, slurm_command: Command) -> None:
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time() - 3600)
    slurm_command("sinfo", "echo 'gpu01|idle'")
    slurm_command("squeue", f"touch {tmp_path}/asked; exit 1")
    attempt = claim.claim_next(run, replace(allocation("slurm", "7"), restart=1), 5, "m", ["10.0.0.1"])
    assert (attempt.attempt, attempt.job_id, attempt.restart, attempt.nodes) == (2, "7", 1, ("gpu01",))
    assert (attempt.port, attempt.secret, attempt.addresses) == (5, "m", ("10.0.0.1",))
    assert not (tmp_path / "asked").exists()
    assert attempts_of(ledger.read(run.events))[0].cause == "lost"


@pytest.mark.parametrize("waits", [False, True])
def test_start_of_a_job_that_does_nothing_is_told_to_its_agents(tmp_path: Path, *, waits: bool) -> None:
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time())
    own = replace(allocation("slurm", "9"), hostnames=("gpu01", "gpu02"))
    claim.refuse(run, replace(own, restart=1), "another start of the job", waits=waits)
    claim.refuse(run, replace(own, job_id="7"), "another job", waits=waits)
    agent = replace(own, node_rank=1)
    with pytest.raises(TorchrelayError, match="the agent on the first node, gpu01, did not start within 0 s"):
        claim.join(run, agent, lambda: False, 0.0)
    claim.refuse(run, own, "not today", waits=waits)
    with pytest.raises(TorchrelayError, match="not today"):
        claim.join(run, agent, lambda: False, 0.0)
    assert claim.why_nothing_started(History.load(run), own) == "not today"
    assert claim.why_nothing_started(History.load(run), replace(own, restart=2)) is None, "another start"


@pytest.mark.parametrize(
    ("cluster", "squeue"),
    [
        ("slurm", "exit 1"),
        ("slurm", "exit 0"),
        ("slurm", "echo '8|RUNNING|None|gpu[01-02]|gpu01|0|N/A|N/A|x|'"),
        ("local", "echo '8|RUNNING|None|gpu02|gpu01|0|N/A|N/A|x|'"),
    ],
    ids=["no answer", "no job", "it is there", "no Slurm"],
)
def test_first_node_that_is_not_known_to_be_dead_is_waited_for(
    tmp_path: Path, slurm_command: Command, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, squeue: str
) -> None:
    run = run_with_a_lost_attempt(tmp_path, cluster, time.time() - 3600)
    monkeypatch.setattr(claim, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(claim, "_POLL_SECONDS", 0.01)
    slurm_command("squeue", squeue)
    slurm_command("scontrol", "echo gpu01; echo gpu02")
    agent = replace(allocation(cluster), node_rank=1, hostnames=("gpu01", "gpu02"))
    with pytest.raises(TorchrelayError, match="did not start within") as error:
        claim.join(run, agent, lambda: False, 0.5)
    assert not isinstance(error.value, FirstNodeLostError)


def test_agents_that_wait_for_a_dead_first_node_replace_the_job_once(
    tmp_path: Path, slurm_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --no-kill such a job keeps its other nodes until its time limit."""
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time() - 3600)
    slurm_command("squeue", f"echo '8|RUNNING|None|gpu[02-03]|gpu01|0|N/A|N/A|{run.script}|'")
    slurm_command("scontrol", 'case "$*" in *hostnames*) echo gpu02; echo gpu03;; *) exit 0;; esac')
    slurm_command("sinfo", 'case "$*" in *%P*) echo "gpu01|gpu*|down*";; *) echo "gpu01|down*";; esac')
    slurm_command("sbatch", f"echo $$ >>{tmp_path}/submitted; echo Submitted batch job 9")
    slurm_command("scancel", f"echo $* >>{tmp_path}/cancelled")
    run.script.write_text("#!/bin/sh\n")
    monkeypatch.setattr(claim, "_LOOK_SECONDS", 0.0)
    names = ("gpu01", "gpu02", "gpu03")
    second, third = (replace(allocation("slurm"), node_rank=rank, hostnames=names) for rank in (1, 2))
    with pytest.raises(FirstNodeLostError, match="gpu01, the first node, was lost before its agent started"):
        claim.join(run, second, lambda: False, 30.0)
    spec = RunSpec.load(run)
    assert replace_job_without_first_node(run, spec, second, "gpu01 was lost") == 0
    with pytest.raises(TorchrelayError):
        replace_job_without_first_node(run, spec, third, "gpu01 was lost")
    assert len((tmp_path / "submitted").read_text().splitlines()) == 1
    assert "8" in (tmp_path / "cancelled").read_text()
    ended = attempts_of(ledger.read(run.events))[-1]
    assert (ended.cause, ended.detail) == ("node_failure", "gpu01 was lost")


def test_job_of_a_complete_or_cancelled_run_records_why_it_starts_nothing(tmp_path: Path) -> None:
    run = run_with_a_lost_attempt(tmp_path, "local", time.time())
    write_events(run, cancelled(), file=run.cancellation.name)
    with pytest.raises(
        TorchrelayError, match=r"run r was cancelled, so this job starts nothing: type hpc resume /.*/r$"
    ):
        claim.claim_next(run, allocation("local"), 1, "m")
    assert not claim.refuse_if_complete(run, allocation("local"))
    run.final.mkdir()
    run.final_result.write_text("{}")
    assert claim.refuse_if_complete(run, allocation("local"))
    assert claim.refuse_if_complete(run, replace(allocation("local"), node_rank=1))
    [refused] = [event for event in records_in(run.events) if event["event"] == "refused"]
    assert refused["detail"].endswith(f"to train longer, type hpc resume {run.path} --epochs N")


def test_job_of_a_script_that_is_complete_starts_nothing(tmp_path: Path) -> None:
    """Slurm may start a preempted job again after another job has completed the run, and users type sbatch."""
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time())
    write_events(run, attempt_ended(), file="attempt-001-end.jsonl")
    own, other = allocation("slurm"), replace(allocation("slurm"), node_rank=1)
    assert not claim.refuse_if_complete(run, other)
    assert claim.refuse_if_complete(run, own)
    with pytest.raises(TorchrelayError, match="run r is complete, so this job starts nothing: to run its script again"):
        claim.join(run, other, lambda: False, 0.0)


@pytest.mark.parametrize("problem", [None, "the other run has no job"])
def test_job_that_must_wait_waits_for_slurm_before_it_goes_back_into_the_queue(
    tmp_path: Path, slurm_command: Command, monkeypatch: pytest.MonkeyPatch, problem: str | None
) -> None:
    first = recorded_run(tmp_path / "first", claimed(1.0), attempt_ended(2.0, "preempted"))
    first.script.touch()
    run = recorded_run(tmp_path / "r", after=(str(first.path),))
    state = "PENDING" if problem is None else "CANCELLED"
    slurm_command("squeue", f"echo '8|{state}|None|gpu01|gpu01|0|N/A|N/A|{first.script}|'")
    asked = tmp_path / "asked"
    slurm_command("scontrol", f"echo $* >>{asked}; [ $(wc -l <{asked}) -gt 1 ] || {{ {AWAY}; }}")
    monkeypatch.setattr(node_attempt, "_RETRY_SECONDS", 0.01)
    assert claim.must_wait(run, RunSpec.load(run), allocation("slurm"))
    way = "requeue" if problem is None else "requeuehold"
    assert [line.split()[:2] for line in asked.read_text().splitlines()[:2]] == [[way, "8"]] * 2


def test_agent_that_is_stopped_does_not_wait_for_space(tmp_path: Path) -> None:
    def act() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        node_attempt.await_storage(RunDir(tmp_path), lambda: True, act)


def test_claim_that_was_made_though_the_storage_reported_an_error_is_the_agents_own(tmp_path: Path) -> None:
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time())
    own = replace(allocation("slurm", "7"), restart=1)
    attempt = claim.claim_next(run, own, 1, "m")
    assert claim.claim_next(run, own, 1, "m") == attempt
    assert attempts_of(ledger.read(run.events))[-1].ended is None
