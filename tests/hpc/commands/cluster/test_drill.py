"""Breaking a run on purpose: what would be done, and to real processes what is done."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.cluster import ROOT, hpc
from support.events import (
    attempt_ended,
    claimed,
    event,
    first_step,
    interruption,
    ranks_started,
    recorded_run,
    submitted,
    train_started,
    write_events,
)
from support.waiting import wait_for

from hpc.base.errors import UserError
from hpc.base.kernel import children, is_alive, process_state, start_time
from hpc.cluster import drill_faults
from hpc.commands.cluster import drill
from hpc.commands.cluster.drill import DrillOptions, DrillTarget, Kind, plan, target_of
from hpc.run.events.history import History
from hpc.run.events.kinds import Event
from hpc.run.nodedir import HeldNodeDir, NodeDir
from hpc.run.rundir import RunDir
from hpc.status.run_view import summarize

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
    for directory in (found.train_metrics.parent, found.packages.parent):
        directory.mkdir(parents=True)
    found.packages.symlink_to(ROOT)
    return found


# Four ranks train on two of three nodes.
TRAINING = (
    claimed(1.0, nodes=("a", "b", "spare")),
    event("rendezvous", 2.0, attempt=1, round=1, members=[1, 0]),
    ranks_started(3.0, world_size=4),
)


def chosen(run: RunDir, *events: Event, **flags: Any) -> DrillTarget:
    """The target of a drill of a run with these events."""
    options = DrillOptions(run="r", **{"kind": "worker-kill", **flags})
    row = structs.replace(summarize(run, None), state="running", job_id="7")
    return target_of(options, run, row, History([*TRAINING, *events]))


def test_last_rank_and_node_are_the_defaults(run: RunDir) -> None:
    by_default = chosen(run)
    assert (by_default.rank, by_default.node) == (3, "b"), "not the first node"
    told = chosen(run, rank=1, node="a")
    assert (told.rank, told.node) == (1, "a")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rank": 4}, "--rank is 4: use 0 to 3"),
        ({"node": "c"}, "--node is 'c': use one of b, a"),
    ],
)
def test_bad_target_is_refused(run: RunDir, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        chosen(run, **flags)


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


def start_rank(memory: NodeDir, rank: int, spawn: Callable[..., Process], at: float = 1.0, code: str = SLEEP) -> int:
    """Start a wrapper with a rank as its child. Returns the process id of the rank."""
    wrapper = spawn(
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-S', '-c', sys.argv[1]]))", code
    )
    fields = {"rank": rank, "pid": wrapper.pid, "started_at": at}
    (memory.exits / f"running-{wrapper.pid}.json").write_text(json.dumps(fields))
    wait_for(lambda: children(wrapper.pid))
    return children(wrapper.pid)[0]


def test_rank_is_found_by_its_newest_wrapper(run: RunDir, memory: NodeDir, spawn: Callable[..., Process]) -> None:
    start_rank(memory, 2, spawn)
    here = start_rank(memory, 2, spawn, at=2.0)
    (memory.exits / "running-0.json").write_text(json.dumps({"rank": 5, "pid": 2**22 + 1, "started_at": 1.0}))
    assert drill_faults.rank_pids(run.path, 2) == [here]
    assert drill_faults.rank_pids(run.path, 3) == []
    assert drill_faults.rank_pids(run.path, 5) == [], "its process has ended"


def test_rank_is_stopped_or_killed(
    run: RunDir, memory: NodeDir, spawn: Callable[..., Process], capsys: pytest.CaptureFixture[str]
) -> None:
    rank = start_rank(memory, 0, spawn)
    assert drill_faults.main([str(run.path), "stop", "0"]) == 0
    wait_for(lambda: process_state(rank) == "T")
    assert drill_faults.main([str(run.path), "kill", "0"]) == 0
    wait_for(lambda: process_state(rank) is None)
    assert capsys.readouterr().out == f"{rank}\n" * 2


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
def rank(run: RunDir, memory: NodeDir, spawn: Callable[..., Process]) -> int:
    """The only rank of a run on this machine, as its process id; the run's controller is this very process."""
    own = os.getpid()
    submission = submitted(job_id=str(own), cluster="local", started=start_time(own))
    write_events(run, submission, claimed(job_id=str(own), nodes=("here",)))
    return start_rank(memory, 0, spawn)


TRAINS, STEPS = train_started(step=7, seconds=0.0, connect_seconds=0.0), first_step(step=8)


@pytest.mark.parametrize(
    ("reports", "steps_lost"),
    [((TRAINS, STEPS), 2), ((STEPS,), None), ((), None)],
    ids=["state", "report", "nothing"],
)
def test_drill_waits_until_the_run_trains_again_and_prints_the_cost(
    run: RunDir, rank: int, reports: Sequence[Event], steps_lost: int | None,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(drill, "_POLL_SECONDS", 0.1)
    written = list[Event]()

    def write(*events: Event) -> None:
        for each in events:
            time.sleep(0.5)  # a drill that does not wait for this event has ended
            written.append(each)
            write_events(run, structs.replace(each, time=time.time()))

    def recover() -> None:
        write(ranks_started(world_size=1), *reports)
        wait_for(lambda: process_state(rank) is None)
        write(interruption(step=9, rank=0, node="here"), ranks_started(world_size=1), *reports)

    recovery = threading.Thread(target=recover)
    recovery.start()
    assert drill.main([str(run.path), "worker-kill", "--yes", "--json"]) == 0
    assert len(written) == 3 + 2 * len(reports)
    recovery.join()
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert (answer["drill"], answer["state"]) == ("worker-kill", "running")
    assert [(one["cause"], one["steps_lost"]) for one in answer["interruptions"]] == [("crashed", steps_lost)]
    assert said.err == "waiting until the ranks of run r have started\n"


def test_drill_of_a_run_that_has_ended_is_refused(run: RunDir) -> None:
    write_events(run, submitted(job_id="7", cluster="local"), claimed(), attempt_ended())
    done = hpc("drill", str(run.path), "worker-kill", "--yes")
    assert done.returncode == 2
    assert "run r has no ranks: its state is completed (hpc status r)" in done.stderr


def test_without_a_terminal_yes_is_required(run: RunDir, rank: int) -> None:
    write_events(run, ranks_started(world_size=1))
    done = hpc("drill", str(run.path), "worker-kill")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no terminal to confirm in: add --yes to kill rank 0 with SIGKILL" in done.stderr
    assert process_state(rank) in {"R", "S"}, "it lives"
