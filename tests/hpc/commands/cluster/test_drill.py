"""Breaking a run on purpose: what would be done, and to real processes what is done."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.cluster import ROOT, hpc
from support.events import claimed, first_step, interruption, recorded_run, submitted, train_started, write_events
from support.waiting import wait_for

from hpc.base.errors import UserError
from hpc.base.files import append_json_line
from hpc.base.kernel import is_alive, start_time
from hpc.cluster import drill_faults
from hpc.commands.cluster import drill
from hpc.commands.cluster.drill import DrillOptions, DrillTarget, Kind, plan, target_of
from hpc.run.nodedir import HeldNodeDir, NodeDir
from hpc.run.rundir import RunDir
from hpc.status.run_view import summarize
from hpc.status.summary import AttemptSummary, Summary

Process = subprocess.Popen[bytes]
SLEEP = "import time; time.sleep(300)"


def target(*, cluster: str = "slurm", testbed: bool = False) -> DrillTarget:
    return DrillTarget(
        run=RunDir(Path("/r/x")), cluster=cluster, job_id="7", nodes=("gpu01", "gpu02"), node="gpu02", rank=3,
        testbed=testbed,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "pretended", "first", "last"),
    [
        ("worker-kill", True, ["srun", "--jobid=7", "--overlap"], ["/r/x", "kill", "3"]),
        ("hang", False, ["srun", "--jobid=7"], ["/r/x", "stop", "3"]),
        ("disk-full", False, ["srun"], ["/r/x", "full", "3"]),
        ("term", True, ["scancel", "--signal=TERM", "7.0"], ["7.0"]),
        ("preempt", True, ["sbatch", "--partition=urgent"], ["--wrap=true"]),
        ("preempt", False, ["scontrol", "requeue", "7"], ["7"]),
        ("node-kill", True, [sys.executable, "-m", "hpc", "testbed"], ["kill-node", "gpu02"]),
        ("node-kill", False, ["srun", "--jobid=7", "--overlap", "--nodes=1", "--nodelist=gpu02"], ["/r/x", "kill-all"]),
    ],
)
def test_command_of_a_drill(kind: Kind, pretended: bool, first: list[str], last: list[str]) -> None:
    command, _ = plan(kind, target(testbed=pretended))
    assert command[: len(first)] == first
    assert command[-len(last) :] == last
    if first[0] == "sbatch":
        assert {"--nodes=2", "--nodelist=gpu01,gpu02", "--exclusive"} <= set(command)


@pytest.mark.parametrize("kind", ["preempt", "node-kill"])
def test_drill_that_needs_slurm(kind: Kind) -> None:
    with pytest.raises(UserError, match=f"{kind} needs Slurm"):
        plan(kind, target(cluster="local"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = recorded_run(tmp_path / "r", cluster="local")
    for directory in (found.train_metrics.parent, found.code):
        directory.mkdir(parents=True)
    (found.packages).symlink_to(ROOT)
    return found


ATTEMPT = AttemptSummary(
    attempt=1, job_id="7", nodes=("a", "b", "spare"), members=("b", "a"), started=0.0, ended=None, cause=None,
    first_step=None, last_step=None, detail=None,
)  # fmt: skip


def training(run: RunDir, **changes: Any) -> Summary:
    """The summary of the run when four ranks train."""
    known: dict[str, Any] = {"state": "running", "world_size": 4, "job_id": "7", "attempts": (ATTEMPT,)}
    return structs.replace(summarize(run, None), **{**known, **changes})


def test_last_rank_and_node_are_the_defaults(run: RunDir) -> None:
    by_default = target_of(DrillOptions(run="r", kind="worker-kill"), run, training(run))
    assert (by_default.rank, by_default.node) == (3, "b"), "not the head node"
    assert target_of(DrillOptions(run="r", kind="disk-full"), run, training(run)).rank == 0, (
        "who writes the checkpoints"
    )
    told = target_of(DrillOptions(run="r", kind="worker-kill", rank=1, node="a"), run, training(run))
    assert (told.rank, told.node) == (1, "a")


@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        ({}, {"state": "completed"}, "is not training"),
        ({}, {"state": "pending"}, "run r is not training: wait until hpc status r shows its step"),
        ({}, {"world_size": None}, "is not training"),
        ({"rank": 4}, {}, "--rank is 4: use 0 to 3"),
        ({"node": "c"}, {}, "--node is 'c': use one of b, a"),
    ],
)
def test_bad_target_is_refused(run: RunDir, changes: dict[str, Any], row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        target_of(DrillOptions(run="r", kind="hang", **changes), run, training(run, **row))


@pytest.fixture
def spawn() -> Iterator[Callable[..., Process]]:
    started = []

    def start(code: str, *arguments: str) -> Process:
        started.append(subprocess.Popen([sys.executable, "-S", "-c", code, *arguments]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def memory(run: RunDir) -> Iterator[NodeDir]:
    held = HeldNodeDir(run.path, 0)
    yield held.files
    held.close(remove=True)


def beat(memory: NodeDir, local_rank: int, rank: int, pid: int, at: float = 1.0) -> None:
    text = json.dumps({"rank": rank, "pid": pid, "step": 9, "phase": "step", "count": 1, "time": at})
    memory.heartbeat(local_rank).write_text(text.ljust(512))


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_rank_is_found_by_its_newest_heartbeat(run: RunDir, memory: NodeDir, spawn: Callable[..., Process]) -> None:
    here, elsewhere = spawn(SLEEP), spawn(SLEEP)
    beat(memory, 0, 2, elsewhere.pid)
    beat(memory, 1, 2, here.pid, at=2.0)
    beat(memory, 2, 5, 2**22 + 1)
    assert drill_faults.rank_pids(run.path, 2) == [here.pid]
    assert drill_faults.rank_pids(run.path, 3) == []
    assert drill_faults.rank_pids(run.path, 5) == [], "its process has ended"


def test_rank_is_stopped_or_killed(
    run: RunDir, memory: NodeDir, spawn: Callable[..., Process], capsys: pytest.CaptureFixture[str]
) -> None:
    process = spawn(SLEEP)
    beat(memory, 0, 0, process.pid)
    assert drill_faults.main([str(run.path), "stop", "0"]) == 0
    wait_for(lambda: state_of(process.pid) == "T")
    assert drill_faults.main([str(run.path), "kill", "0"]) == 0
    assert process.wait(30) == -signal.SIGKILL
    assert capsys.readouterr().out == f"{process.pid}\n" * 2


WRITER = """
import sys, time
while True:
    try:
        with open(sys.argv[1], "wb") as large:
            large.write(bytes(1 << 20))
        word = "written"
    except OSError:
        word = "refused"
    with open(sys.argv[2], "a") as log:
        log.write(word + chr(10))
    time.sleep(0.02)
"""


def test_full_disk_lasts_a_while(
    run: RunDir, memory: NodeDir, spawn: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill_faults, "_FULL_SECONDS", 0.5)
    log = tmp_path / "log"
    beat(memory, 0, 0, spawn(WRITER, str(tmp_path / "large"), str(log)).pid)
    wait_for(lambda: log.exists() and "written" in log.read_text())
    assert drill_faults.main([str(run.path), "full", "0"]) == 0
    assert "refused" in log.read_text()
    wait_for(lambda: log.read_text().endswith("written\n"))


PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'import time; time.sleep(300)'])"


def test_agent_tree_has_the_agent_and_its_descendants(run: RunDir, spawn: Callable[..., Process]) -> None:
    agent = spawn(PARENT, "jobs.agent", str(run.path))
    spawn(SLEEP, "jobs.agent", "/another/run")
    wait_for(lambda: len(drill_faults.agent_tree(run.path)) == 2)
    first, child = drill_faults.agent_tree(run.path)
    assert first == agent.pid
    started = start_time(child)
    drill_faults.main([str(run.path), "kill-all"])
    assert agent.wait(30) == -signal.SIGKILL
    wait_for(lambda: not is_alive(child, started))


@pytest.fixture
def rank(run: RunDir, memory: NodeDir, spawn: Callable[..., Process]) -> Process:
    """The only rank of a run that trains on this machine; its controller is this very process."""
    process, own = spawn(SLEEP), os.getpid()
    beat(memory, 0, 0, process.pid)
    submission = submitted(job_id=str(own), cluster="local", started=start_time(own))
    write_events(run, submission, claimed(job_id=str(own), nodes=("here",)))
    append_json_line(run.train_metrics, {"step": 9, "epoch": 1, "world_size": 1, "time": time.time()})
    return process


def test_drill_waits_for_the_first_step_and_prints_the_cost(
    run: RunDir, rank: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    def recover() -> None:
        rank.wait(60)
        write_events(run, interruption(step=9, failed_at=time.time(), rank=0, node="here"))
        write_events(run, train_started(step=7, seconds=0.0, connect_seconds=0.0), first_step(step=8))

    recovery = threading.Thread(target=recover)
    recovery.start()
    assert drill.main([str(run.path), "worker-kill", "--yes", "--json"]) == 0
    recovery.join()
    assert rank.returncode == -signal.SIGKILL
    answer = json.loads(capsys.readouterr().out)
    assert (answer["drill"], answer["state"]) == ("worker-kill", "running")
    assert [(interruption["cause"], interruption["steps_lost"]) for interruption in answer["interruptions"]] == [
        ("crashed", 2)
    ]


def test_without_a_terminal_yes_is_required(run: RunDir, rank: Process) -> None:
    done = hpc("drill", str(run.path), "worker-kill")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no terminal to confirm in: add --yes to kill rank 0 with SIGKILL" in done.stderr
    assert rank.poll() is None
