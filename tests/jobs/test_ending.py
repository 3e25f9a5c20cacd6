"""Which agent may take over from a lost first node, and how the run continues."""

import os
from pathlib import Path

import pytest
from support.cluster import Command
from support.ended_attempts import HOSTS, AnsweringSlurm, EndedAttempt, EndedAttemptMaker
from support.events import cancelled, joined, recorded, write_events

from hpc.base.errors import EXIT_NO_SPACE
from hpc.run.events import ledger
from hpc.run.events.attempts import attempts_of
from hpc.run.events.kinds import NodeLost
from hpc.run.spec import Recovery
from jobs import last_resort, node_attempt
from jobs.ending import first_node_is_lost
from jobs.next_attempt import LostNodes, start_next_attempt
from jobs.node_attempt import NodeAllocation

SHORT_DELAY = "AuthInfo = cred_expire=5"


@pytest.mark.parametrize(
    ("rank", "nodes", "lost", "is_lost"),
    [
        (1, 2, ["gpu01"], True),  # the last agent needs no confirmation
        (2, 3, ["gpu02", "gpu01"], True),  # gpu01 had lost gpu02 before
        (2, 3, ["gpu01"], None),
        (2, 3, ["gpu01", "gpu01"], True),
        (2, 3, ["gpu01", "gpu03"], False),
        (1, 2, ["gpu02", "gpu01"], False),
    ],
)
def test_first_node_is_lost_if_the_others_confirm_it(
    rank: int, nodes: int, lost: list[str], is_lost: bool | None
) -> None:
    allocation = NodeAllocation(
        cluster="slurm", job_id="7", restart=0, hostnames=HOSTS[:nodes], node_rank=rank, cpus=2
    )  # fmt: skip
    assert first_node_is_lost(lost, allocation) is is_lost


@pytest.mark.timeout(30)
def test_survivors_read_only_what_the_agents_of_their_attempt_wrote(ended: EndedAttemptMaker) -> None:
    survivor = ended(node_rank=1)
    for name in ("attempt-000-node-00", "attempt-001-trainer", "next-001", "supervisor"):
        os.mkfifo(survivor.run.events / f"{name}.jsonl")  # who opens it waits for ever
    survivor.node.record(NodeLost(node="gpu01", last_heard=1.0, detail="lost contact with gpu01"))
    assert survivor.node.reported_lost() == ["gpu01"]


# What Slurm 22.05 answered.
DISABLED = "echo 'Requested operation is presently disabled' >&2; exit 1"
TOO_MANY = """
echo 'sbatch: error: AssocMaxSubmitJobLimit' >&2
echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, ...)" >&2
exit 1
"""


def test_job_is_requeued_once_though_slurm_does_not_list_the_nodes_then(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, slurm_command: Command
) -> None:
    """The job cannot avoid a node without that list."""
    bad = ended(recovery=Recovery(continue_with="requeue"))
    slurm_command("sinfo", "exit 1")
    assert start_next_attempt(bad.node, LostNodes(bad=["gpu02"]))
    assert slurm.asked == ["scontrol requeue"]


def test_run_that_is_cancelled_while_slurm_is_away_gets_no_other_job(
    ended: EndedAttemptMaker, slurm: AnsweringSlurm, slurm_command: Command, tmp_path: Path
) -> None:
    stopped = ended(recovery=Recovery(continue_with="requeue"))
    write_events(stopped.run, cancelled(), file="written")
    cancels = f"mv {stopped.run.events}/written {stopped.run.cancellation}"
    away = "echo 'slurm_update error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    slurm_command("scontrol", f"echo $* >>{tmp_path}/scontrol; {cancels}; {away}")
    assert not start_next_attempt(stopped.node, LostNodes())
    assert (tmp_path / "scontrol").read_text().count("requeue") == 1
    assert (stopped.continued(), slurm.asked) == ([], [])


def test_job_that_a_limit_counts_ends_before_it_is_replaced(
    ended: EndedAttemptMaker, slurm_command: Command, tmp_path: Path
) -> None:
    limited = ended()
    slurm_command("scontrol", DISABLED)
    slurm_command("scancel", f"echo $1 > {tmp_path}/ended")
    slurm_command("sbatch", f"test -e {tmp_path}/ended || {{ {TOO_MANY} }}; echo 8")
    assert start_next_attempt(limited.node, LostNodes())
    assert (tmp_path / "ended").read_text() == "7\n"
    [resubmitted] = recorded(limited.node, "resubmitted")
    assert (resubmitted["job_id"], resubmitted["old_job_id"]) == ("8", "7")


def test_refusals_of_all_are_final(
    ended: EndedAttemptMaker, slurm_command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = ended()
    slurm_command("scontrol", DISABLED)
    slurm_command("sbatch", TOO_MANY)
    slurm_command("scancel", f"touch {tmp_path}/ended")
    assert not start_next_attempt(stopped.node, LostNodes())
    assert (tmp_path / "ended").exists()
    assert recorded(stopped.node, "not_continued")
    assert f"type hpc resume {stopped.run.path}" in capsys.readouterr().out


@pytest.fixture
def left(ended: EndedAttemptMaker, monkeypatch: pytest.MonkeyPatch) -> EndedAttempt:
    """What the batch script, which outlives the agents on the first node, has when srun has ended."""
    environment = {
        "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-03]", "SLURM_PROCID": "0",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(node_attempt, "_ALIVE_SECONDS", 0.05)
    return ended(*(joined(node=name, node_rank=rank) for rank, name in enumerate(HOSTS)))


def test_last_resort_sends_heartbeats(left: EndedAttempt, tmp_path: Path, slurm_command: Command) -> None:
    """Its agents were killed; Slurm takes the requeue once there is a heartbeat."""
    alive, asked = left.run.alive, tmp_path / "asked-to-requeue"
    requeue = f"touch {asked}; until [ {alive} -nt {asked} ]; do sleep 0.1; done"
    show = "echo JobId=7 JobState=RUNNING Restarts=0 Reason=None"
    slurm_command(
        "scontrol", f'case "$*" in *requeue*) {requeue};; *config*) echo "{SHORT_DELAY}";; *show*) {show};; esac'
    )
    assert last_resort.main([str(left.run.path), "137"]) == 0
    assert [event["job_id"] for event in recorded(left.node, "requeued")] == ["7"]
    assert left.end["cause"] == "lost"
    assert "signature" not in left.end, "it is unknown, so a second one need not be the same"


def test_job_that_waited_an_hour_for_space_has_failed_and_blames_no_node(
    left: EndedAttempt, slurm: AnsweringSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.says_of_job("JobState=RUNNING Restarts=1 Reason=None")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert last_resort.main([str(left.run.path), str(EXIT_NO_SPACE)]) == 1
    assert attempts_of(ledger.read(left.run.events))[-1].cause == "no_space"
    assert left.continued() == []
