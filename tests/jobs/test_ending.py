"""Which agent may take over from a lost first node, and how the run continues."""

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster import Command
from support.events import claimed, recorded, recorded_run, resources_of, write_events

from hpc.base.errors import EXIT_NO_SPACE
from hpc.run.events import ledger
from hpc.run.events.attempts import attempts_of
from hpc.run.events.kinds import Joined, NodeLost
from hpc.run.nodedir import NodeDir
from hpc.run.spec import Recovery, RunSpec
from jobs import ending, last_resort, node_attempt
from jobs.ending import first_node_is_lost
from jobs.next_attempt import LostNodes, start_next_attempt
from jobs.node_attempt import NodeAllocation, NodeAttempt

SHORT_DELAY = "AuthInfo = cred_expire=5"


def to_requeue(node: NodeAttempt) -> NodeAttempt:
    return replace(node, spec=replace(node.spec, recovery=Recovery(continue_with="requeue")))


def allocation(node_rank: int, nodes: int) -> NodeAllocation:
    names = tuple(f"gpu{number:02d}" for number in range(1, nodes + 1))
    return NodeAllocation(cluster="slurm", job_id="7", restart=0, hostnames=names, node_rank=node_rank, cpus=2)


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
    assert first_node_is_lost(lost, allocation(rank, nodes)) is is_lost


@pytest.fixture
def survivor(tmp_path: Path, slurm_command: Command, monkeypatch: pytest.MonkeyPatch) -> NodeAttempt:
    """The only agent that is left of two; the first node's has sent no heartbeat for minutes."""
    run = recorded_run(tmp_path / "r", resources=resources_of(nodes="2"))
    write_events(run, claimed(nodes=("gpu01", "gpu02")), file="attempt-001-node-00.jsonl")
    run.script.touch()
    run.alive.touch()
    os.utime(run.alive, (time.time() - 200,) * 2)
    slurm_command("squeue", f"echo '7|RUNNING|None|gpu[01-02]|gpu01|0|N/A|N/A|{run.script}|'")
    slurm_command("sinfo", "exit 0")
    slurm_command("scancel", f'echo "$@" >> {tmp_path}/cancelled')
    monkeypatch.setattr(node_attempt, "_ALIVE_SECONDS", 0.05)
    return NodeAttempt(
        run=run, spec=RunSpec.load(run), allocation=allocation(1, 2),
        attempt=attempts_of(ledger.read(run.events))[0],
    )  # fmt: skip


@pytest.mark.timeout(30)
def test_survivors_read_only_what_the_agents_of_their_attempt_wrote(survivor: NodeAttempt) -> None:
    for name in ("attempt-000-node-00", "attempt-001-trainer", "next-001", "supervisor"):
        os.mkfifo(survivor.run.events / f"{name}.jsonl")  # who opens it waits for ever
    survivor.record(NodeLost(node="gpu01", last_heard=1.0, detail="lost contact with gpu01"))
    assert survivor.reported_lost() == ["gpu01"]


def take_over(node: NodeAttempt) -> int:
    """What an agent does that has lost contact with its first node, and has no snapshot."""
    directive = SimpleNamespace(members=(0, 1))
    channel: Any = SimpleNamespace(silent_seconds=6.0, directive=directive, first_node_has_ended=False)
    monitor: Any = SimpleNamespace(
        last_step=5, counted_steps=None, node_dir=NodeDir(node.run.path / "memory"), is_stopping=False
    )
    return ending.take_over(node, channel, monitor)


def test_agent_that_takes_over_sends_heartbeats(survivor: NodeAttempt, tmp_path: Path, slurm_command: Command) -> None:
    """Whatever takes it long: here it is sbatch, which answers once it has seen a heartbeat."""
    alive, asked = survivor.run.alive, tmp_path / "asked"
    slurm_command("sbatch", f"touch {asked}; until [ {alive} -nt {asked} ]; do sleep 0.1; done; echo 8")
    assert take_over(survivor) == 0
    assert [event["job_id"] for event in recorded(survivor, "resubmitted")] == ["8"]
    assert (tmp_path / "cancelled").read_text() == "7\n"


# What Slurm 22.05 answered.
DISABLED = "echo 'Requested operation is presently disabled' >&2; exit 1"
TOO_MANY = """
echo 'sbatch: error: AssocMaxSubmitJobLimit' >&2
echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, ...)" >&2
exit 1
"""
AWAY = "echo 'slurm_requeue error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


@pytest.fixture
def node(tmp_path: Path, slurm_command: Command, monkeypatch: pytest.MonkeyPatch) -> NodeAttempt:
    """The part of the node gpu01 in a job of two; Slurm does whatever it is asked to."""
    monkeypatch.setattr(node_attempt, "_RETRY_SECONDS", 0.05)
    run = recorded_run(tmp_path / "r")
    for name, answer in {"scontrol": "", "sbatch": "echo 8", "scancel": "", "squeue": ""}.items():
        slurm_command(name, answer)
    slurm_command("sinfo", "printf 'gpu01|idle\\ngpu02|idle*\\n'")
    return NodeAttempt(
        run=run, spec=RunSpec.load(run), allocation=allocation(0, 2),
        attempt=attempts_of([claimed(1.0, nodes=("gpu01", "gpu02"))])[0],
    )  # fmt: skip


def test_job_is_requeued_once_though_slurm_does_not_list_the_nodes_then(
    node: NodeAttempt, slurm_command: Command
) -> None:
    """The job cannot avoid a node without that list."""
    log = node.run.path / "scontrol"
    slurm_command("scontrol", f'echo "$@" >> {log}')
    slurm_command("sinfo", "exit 1")
    assert start_next_attempt(to_requeue(node), LostNodes(bad=["gpu02"]))
    assert log.read_text() == "requeue 7\n"


def test_job_that_a_limit_counts_ends_before_it_is_replaced(
    node: NodeAttempt, slurm_command: Command, tmp_path: Path
) -> None:
    slurm_command("scontrol", DISABLED)
    slurm_command("scancel", f"echo $1 > {tmp_path}/ended")
    slurm_command("sbatch", f"test -e {tmp_path}/ended || {{ {TOO_MANY} }}; echo 8")
    assert start_next_attempt(node, LostNodes())
    assert (tmp_path / "ended").read_text() == "7\n"
    [resubmitted] = recorded(node, "resubmitted")
    assert (resubmitted["job_id"], resubmitted["old_job_id"]) == ("8", "7")


def test_refusals_of_all_are_final(
    node: NodeAttempt, slurm_command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_command("scontrol", DISABLED)
    slurm_command("sbatch", TOO_MANY)
    slurm_command("scancel", f"touch {tmp_path}/ended")
    assert not start_next_attempt(node, LostNodes())
    assert (tmp_path / "ended").exists()
    assert recorded(node, "not_continued")
    assert f"type hpc resume {node.run.path}" in capsys.readouterr().out


@pytest.fixture
def batch_script(survivor: NodeAttempt, monkeypatch: pytest.MonkeyPatch) -> NodeAttempt:
    """What outlives the agents on the first node, when srun has ended."""
    environment = {
        "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_PROCID": "0",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return survivor


def test_last_resort_sends_heartbeats(batch_script: NodeAttempt, tmp_path: Path, slurm_command: Command) -> None:
    """Its agents were killed; Slurm takes the requeue once there is a heartbeat."""
    survivor = batch_script
    for number, name in enumerate(("gpu01", "gpu02")):
        survivor.record(Joined(node=name, node_rank=number))
    alive, asked = survivor.run.alive, tmp_path / "asked"
    requeue = f"touch {asked}; until [ {alive} -nt {asked} ]; do sleep 0.1; done"
    show = "echo JobId=7 JobState=RUNNING Restarts=0 Reason=None"
    slurm_command(
        "scontrol", f'case "$*" in *requeue*) {requeue};; *config*) echo "{SHORT_DELAY}";; *show*) {show};; esac'
    )
    assert last_resort.main([str(survivor.run.path), "137"]) == 0
    assert [event["job_id"] for event in recorded(survivor, "requeued")] == ["7"]
    [ended] = recorded(survivor, "attempt_ended")
    assert (ended["cause"], ended["signature"]) == ("lost", None), "unknown, so a second one need not be the same"


def test_job_that_waited_an_hour_for_space_has_failed_and_blames_no_node(
    batch_script: NodeAttempt, slurm_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = batch_script.run
    slurm_command("scontrol", 'case "$*" in *show*) echo JobId=7 JobState=RUNNING Restarts=1 Reason=None;; esac')
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert last_resort.main([str(run.path), str(EXIT_NO_SPACE)]) == 1
    events = ledger.read(run.events)
    assert attempts_of(events)[-1].cause == "no_space"
    assert not {"requeued", "resubmitted", "excluded"} & {event.kind for event in events}
