"""The parts of the node agent that need no cluster, against real processes."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE
from support.cluster import ROOT, need
from support.events import recorded_run, records_in, resources_of

from hpc.run.events import ledger
from hpc.run.events.attempts import attempts_of
from hpc.run.events.history import History
from hpc.run.events.kinds import NodeLost
from hpc.run.rundir import RunDir

LIMITED = """
import resource
from jobs import agent
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
agent.main(["/no/such/run"])
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""


def test_agent_may_open_as_many_files_as_the_administrators_allow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=ROOT, env={**os.environ, **LOCAL_JOB}, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout.splitlines()[-1] == b"True"


LOCAL_JOB = {
    "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7", "SUBMITIT_LOCAL_NTASKS": "1",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1", "SUBMITIT_LOCAL_NODEID": "0", "SUBMITIT_LOCAL_GLOBALID": "0",
    "SUBMITIT_LOCAL_LOCALID": "0",
}  # fmt: skip
NO_MEMORY = """
mount -t tmpfs -o mode=1777,nr_inodes=2 none /dev/shm
mount -t tmpfs -o mode=1777,nr_inodes=2 none /tmp
"""
# It shows in the thread of a connection, once the agents have met.
DEFECT_IN_THE_CHANNEL = """
import sys
from jobs import agent
from jobs.control import channel
decode, first = channel.decode, [1, 2, 3]
channel.decode = lambda message, kind: decode(message, kind) if first and first.pop() else message["no such field"]
sys.exit(agent.main({argv}))
"""


def start_agent(run: RunDir, mounts: str = "", code: str = "", rank: int = 0) -> "subprocess.Popen[str]":
    need("unshare", "mount")
    argv = ["-c", code.format(argv=[str(run.path)])] if code else ["-m", "jobs.agent", str(run.path)]
    script = f"{mounts}\nexec {shlex.join([sys.executable, *argv])}"
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, **LOCAL_JOB, "SUBMITIT_LOCAL_GLOBALID": str(rank)},
    )  # fmt: skip


def test_agent_that_fails_after_its_claim_ends_the_attempt_and_has_the_run_continue(shared: Path) -> None:
    run = recorded_run(shared / "r", cluster="local")
    with start_agent(run, mounts=NO_MEMORY) as agent:
        output, _ = agent.communicate(timeout=120)
    [attempt] = attempts_of(ledger.read(run.events))
    assert attempt.cause == "bad_node", output
    assert "No space left on device" in (attempt.detail or "")
    assert agent.returncode == LOCAL_REQUEUE_RETURN_CODE
    [requeued] = [event for event in records_in(run.events) if event["event"] == "requeued"]
    assert requeued["attempt"] == 1


def test_agent_of_another_node_that_fails_marks_its_node_as_bad(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_JOB, "SUBMITIT_LOCAL_NTASKS", "2")
    run = recorded_run(shared / "r", cluster="local", resources=resources_of(nodes="2"))
    with start_agent(run) as head, start_agent(run, mounts=NO_MEMORY, rank=1) as other:
        output, _ = head.communicate(timeout=120)
        other.communicate(timeout=120)
    [attempt] = attempts_of(ledger.read(run.events))
    assert attempt.cause == "bad_node", output
    assert "No space left on device" in (attempt.detail or "")
    assert (head.returncode, other.returncode) == (LOCAL_REQUEUE_RETURN_CODE, 0)


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_defect_in_the_control_channel_ends_its_agent_with_a_traceback_and_the_attempt_as_crashed(
    shared: Path, monkeypatch: pytest.MonkeyPatch, broken_rank: int
) -> None:
    monkeypatch.setitem(LOCAL_JOB, "SUBMITIT_LOCAL_NTASKS", "2")
    run = recorded_run(shared / "r", cluster="local", resources=resources_of(nodes="2"))
    codes = ["", ""]
    codes[broken_rank] = DEFECT_IN_THE_CHANNEL
    with start_agent(run, code=codes[0]) as head, start_agent(run, code=codes[1], rank=1) as other:
        outputs = [agent.communicate(timeout=120)[0] for agent in (head, other)]
    assert "Traceback" in outputs[broken_rank]
    [attempt] = attempts_of(ledger.read(run.events))
    assert attempt.cause == "crashed", outputs
    assert "KeyError: 'no such field'" in (attempt.detail or "")
    if broken_rank:  # a first node's agent that understands nobody also answers nobody
        assert not History.load(run).of(NodeLost)
