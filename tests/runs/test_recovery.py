"""The ladder of recovery on a real Slurm: whatever fails, the run goes on, and ends with the same weights."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    LONG,
    SMALL_BATCH,
    Run,
    Site,
    agent_pids,
    assert_equal,
    assert_nothing_left,
    dead,
    rank_pids,
    tiny_data,
)

from hpc.core.files import read_json_lines
from hpc.core.rundir import RunDir
from hpc.slurm.client import TESTBED_DIRECTORY
from jobs.control.channel import LOST_SECONDS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
# Long enough to be interrupted, short enough to be trained to the end: 30 steps an epoch.
WHOLE = (
    *SMALL_BATCH,
    "--epochs=10",
    "--log-every=1",
    "--gpus-per-node=1",
    "--cpus-per-gpu=1",
    "--snapshot-every=5",
    "--log-samples",
)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="torchrelay-test-", dir="/var/tmp"))
    path.chmod(0o755)
    tiny_data(path / "data")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def site(testbed: dict[str, Any], place: Path) -> Iterator[Site]:
    here = Site(place, testbed["slurm_conf"])
    yield here
    here.end_all_jobs()


@pytest.fixture(scope="module")
def undisturbed(testbed: dict[str, Any], place: Path) -> RunDir:
    """The same training on two nodes with a rank each, without interruption."""
    run = Site(place, testbed["slurm_conf"]).submit("--data=data", "--name=undisturbed", "--nodes=2", *WHOLE)
    run.wait_for_state("completed")
    return run.directory


def test_killed_worker(site: Site, undisturbed: RunDir) -> None:
    run = site.submit("--data=data", "--name=worker", "--nodes=2", *WHOLE)
    run.wait_for_steps(50)
    nodes = run.status()["attempts"][0]["nodes"]
    [victim] = rank_pids(run, nodes[1])
    os.kill(victim, signal.SIGKILL)
    run.wait("the interruption", lambda: run.events("interruption"))
    status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert_equal(undisturbed, run.directory)
    [attempt] = status["attempts"]
    [interruption] = status["interruptions"]
    assert (interruption["cause"], interruption["node"], interruption["rank"]) == (
        "crashed",
        nodes[1],
        interruption["rank"],
    )
    assert "signal SIGKILL" in interruption["detail"]
    assert interruption["steps_lost"] <= 6, "the snapshot interval and the step under way"
    assert attempt["cause"] == "completed"
    assert_nothing_left(run)


def test_lost_node_is_replaced_by_a_spare(site: Site, undisturbed: RunDir) -> None:
    run = site.submit("--data=data", "--name=spare", "--nodes=2", "--spares=1", *WHOLE)
    run.wait_for_steps(50)
    nodes = run.status()["attempts"][0]["nodes"]
    # The first two that are ready train.
    [first] = [event["members"] for event in run.events("rendezvous")]
    [spare] = {0, 1, 2} - set(first)
    gone = next(rank for rank in first if rank != 0)
    lost = nodes[gone]
    with dead(site, lost):
        status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert_equal(undisturbed, run.directory)
    assert [attempt["cause"] for attempt in status["attempts"]] == ["completed"]
    assert [event["members"] for event in run.events("rendezvous")] == [
        first,
        [*(rank for rank in first if rank != gone), spare],
    ]
    [interruption] = status["interruptions"]
    assert (interruption["cause"], interruption["node"]) == ("node_failure", lost)
    assert interruption["steps_lost"] <= 6


def test_the_others_go_on_without_a_lost_node(site: Site, undisturbed: RunDir) -> None:
    run = site.submit("--data=data", "--name=elastic", "--nodes=3", "--elastic", *WHOLE)
    run.wait_for_steps(50)
    nodes = run.status()["attempts"][0]["nodes"]
    with dead(site, nodes[2]):
        status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert [attempt["cause"] for attempt in status["attempts"]] == ["completed"]
    assert {line["world_size"] for line in read_json_lines(run.directory.train_metrics)} == {3, 2}
    assert samples_by_step(run.directory) == samples_by_step(undisturbed), "on whatever number of ranks"


def samples_by_step(run: RunDir) -> dict[int, list[int]]:
    """The images of each step, as they were used by the last ranks that made it."""
    world = {line["step"]: line["world_size"] for line in read_json_lines(run.train_metrics)}
    found: dict[int, dict[int, list[int]]] = {}
    for path in sorted((run.path / "metrics" / "samples").glob("*.jsonl")):
        rank = int(path.stem.rpartition("-")[2])
        for line in read_json_lines(path):
            found.setdefault(line["step"], {})[rank] = line["indices"]
    return {step: sorted(index for rank in range(world[step]) for index in found[step][rank]) for step in sorted(world)}


@pytest.mark.parametrize("which", ["head", "other"])
def test_lost_node_of_a_run_that_needs_all(site: Site, undisturbed: RunDir, which: str) -> None:
    """Whoever is left hands the run to a new job, long before Slurm notices."""
    run = site.submit("--data=data", f"--name=lost-{which}", "--nodes=2", *WHOLE)
    run.wait_for_steps(50)
    nodes = run.status()["attempts"][0]["nodes"]
    with dead(site, nodes[0 if which == "head" else 1]):
        run.wait("the new job", lambda: run.events("resubmitted"))
        status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert_equal(undisturbed, run.directory)
    first, second = status["attempts"]
    assert (first["cause"], second["cause"]) == ("node_failure", "completed")
    [resubmitted] = run.events("resubmitted")
    assert (first["job_id"], second["job_id"]) == (run.job_id, resubmitted["job_id"]) != (run.job_id, run.job_id)
    assert not set(resubmitted["excluded"]) & set(second["nodes"])
    assert not run.events("requeued")
    assert status["interruptions"][0]["steps_lost"] <= 6
    run.wait("the end of the crippled job", lambda: run.job_id not in site.slurm("squeue", "--me", "-h", "-o%A"))


@pytest.mark.parametrize("which", ["head", "other"])
def test_node_that_loses_its_link_for_seconds_comes_back(site: Site, undisturbed: RunDir, which: str) -> None:
    run = site.submit("--data=data", f"--name=link-{which}", "--nodes=2", *WHOLE)
    run.wait_for_steps(50)
    node = run.status()["attempts"][0]["nodes"][0 if which == "head" else 1]
    link = ("nsenter", f"--net={TESTBED_DIRECTORY / 'ns' / node}.net", "ip", "link", "set", "eth0")
    subprocess.run([*link, "down"], check=True)
    try:
        time.sleep(LOST_SECONDS + 3)
    finally:
        subprocess.run([*link, "up"], check=True)
    status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert_equal(undisturbed, run.directory)
    [attempt] = status["attempts"]
    assert (attempt["job_id"], attempt["cause"]) == (run.job_id, "completed")
    assert [event["node"] for event in run.events("node_returned")] == [attempt["nodes"][1]]
    [interruption] = status["interruptions"]
    assert (interruption["cause"], interruption["steps_lost"] <= 6) == ("node_failure", True)
    assert not run.events("resubmitted")


def test_hung_worker(site: Site, undisturbed: RunDir) -> None:
    run = site.submit("--data=data", "--name=hang", "--nodes=2", "--hang-timeout=5s", *WHOLE)
    run.wait_for_steps(50)
    [victim] = rank_pids(run, run.status()["attempts"][0]["nodes"][1])
    os.kill(victim, signal.SIGSTOP)
    run.wait("the interruption", lambda: run.events("interruption"))
    status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert_equal(undisturbed, run.directory)
    [interruption] = status["interruptions"]
    assert interruption["cause"] == "hang"
    assert "is stopped, and the others wait for it" in interruption["detail"]
    logs = "".join(path.read_text() for path in run.directory.attempt_logs(1).glob("rank-*.log"))
    assert "Fatal Python error: Aborted" in logs, "the stacks of the ranks that waited"


def test_suspension_is_no_hang(site: Site) -> None:
    run = site.submit("--data=data", "--name=suspended", *LONG, "--hang-timeout=5s")
    run.wait_for_steps(50)
    site.slurm("scontrol", "suspend", run.job_id)
    run.wait("the suspension", lambda: run.queue("%T") == "SUSPENDED")
    before = len(run.steps())
    time.sleep(8)
    site.slurm("scontrol", "resume", run.job_id)
    run.wait("new steps", lambda: len(run.steps()) > before + 100)
    assert not run.events("interruption"), run.evidence()
    assert not run.events("node_lost")
    assert run.status()["state"] == "running"


def send(run: Run, *names: str) -> None:
    """Bare signals to every process of the agents' step, as on clusters that send nothing else."""
    for name in names:
        run.site.slurm("scancel", f"--signal={name}", f"{run.job_id}.0")


MOMENTS = {
    "staging": (lambda run: len(run.events("joined")) == 2, ("TERM",), "requeued"),
    "rendezvous": (lambda run: run.events("rendezvous"), ("TERM",), "requeued"),
    "steps": (lambda run: len(run.steps()) > 50, ("USR2", "TERM", "TERM", "USR2"), "time_limit"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_signals_end_in_a_saved_state_and_one_requeue(site: Site, undisturbed: RunDir, moment: str) -> None:
    reached, signals, cause = MOMENTS[moment]
    large = site.path / "data" / "large"
    if moment == "staging":
        with large.open("wb") as file:
            file.truncate(2 * 2**30)  # seconds of copying, no space
    run = site.submit("--data=data", f"--name=term-{moment}", "--nodes=2", *WHOLE)
    run.wait(f"the {moment}", lambda: reached(run))
    if moment == "staging":
        assert not run.events("staged"), "the copy was too quick for this test"
        large.unlink()
    send(run, *signals)
    run.wait_for_release()
    before = run.steps()
    status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert run.steps()[: len(before)] == before
    assert [attempt["cause"] for attempt in status["attempts"]] == [cause, "completed"]
    assert status["steps_lost"] == 0
    assert len(run.events("requeued")) == 1
    assert_equal(undisturbed, run.directory)


def test_refused_requeue_is_replaced_by_a_new_job(site: Site, undisturbed: RunDir) -> None:
    run = site.submit("--data=data", "--name=refused", "--nodes=2", *WHOLE)
    run.wait_for_steps(50)
    site.slurm("scontrol", "update", f"JobId={run.job_id}", "Requeue=0")
    send(run, "TERM")
    run.wait("the new job", lambda: run.events("resubmitted"))
    status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert status["steps_lost"] == 0
    assert [attempt["cause"] for attempt in status["attempts"]] == ["requeued", "completed"]
    assert status["attempts"][1]["job_id"] == run.events("resubmitted")[0]["job_id"] != run.job_id
    assert_equal(undisturbed, run.directory)


STEPS = """
import json, os, signal, sys, time
from pathlib import Path

told = []
signal.signal(signal.SIGUSR2, lambda *_: told.append(True))
run, rank = Path(os.environ["TORCHRELAY_RUN_DIR"]), int(os.environ["RANK"])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(1, 10**9):
    beat = {"pid": os.getpid(), "rank": rank, "step": step, "phase": "step", "step_seconds": 0.1}
    Path(os.environ["TORCHRELAY_HEARTBEAT"]).write_text(json.dumps(beat))
    if told:
        (run / "stop").touch()
    if (run / "stop").exists():
        sys.exit(0)
    time.sleep(1000 if first and step == 10 else 0.1)
"""


def test_own_script_is_checked_watched_and_stopped(site: Site) -> None:
    (site.path / "steps.py").write_text(STEPS)
    for command in (("git", "init", "-q"), ("git", "add", "steps.py")):
        assert site.type(*command).returncode == 0
    flags = ("--nodes=2", "--gpus-per-node=1", "--hang-timeout=3s", "--name=steps")
    run = site.submit(*flags, "--", "steps.py")
    run.wait("the interruption", lambda: run.events("interruption"))
    [preflight], [checked], [hang] = (run.events(kind) for kind in ("preflight", "checked", "interruption"))
    assert preflight["world_size"] == 2
    [attempt] = run.status()["attempts"]
    assert checked["nodes"] == attempt["nodes"]
    assert (hang["cause"], hang["round"]) == ("hang", 2), "the first round is the preflight's"
    log = run.directory.rank_log(1, 1)
    run.wait("the stacks", lambda: "Fatal Python error: Aborted" in log.read_text())
    # A signal that only one node gets, and not the head: the script ends with 0, and is not complete.
    [agent] = agent_pids(run, attempt["nodes"][1])
    os.kill(agent, signal.SIGUSR2)
    run.wait("the requeue", lambda: run.events("requeued"))
    assert run.status()["attempts"][0]["cause"] == "time_limit"


def test_same_failure_twice_in_a_row_ends_the_run_with_the_rank_that_failed_first(site: Site) -> None:
    run = site.submit("--data=data", "--name=twice", *LONG, "--gpus-per-node=2", TORCHRELAY_FAULT="raise@8:3!")
    status = run.wait_for_state("failed")
    assert status["attempts"][-1]["cause"] == "crashed"
    assert status["detail"].startswith("rank 3 on ")
    assert len(run.events("interruption")) == 1
    assert status["budget"]["same_failure_twice"] is True
    assert not run.events("requeued")


def test_bad_node_is_excluded(site: Site) -> None:
    run = site.submit("--data=data", "--name=bad-node", *LONG, TORCHRELAY_FAULT="preflight@0:1")
    run.wait("the requeue", lambda: run.events("requeued"))
    [first] = run.status()["attempts"]
    assert first["cause"] == "bad_node"
    [failed] = [event for event in run.events("rank_failed") if event["cause"] == "bad_node"]
    run.wait(
        "the exclusion", lambda: f"ExcNodeList={failed['node']}" in site.slurm("scontrol", "show", "job", run.job_id)
    )
    assert json.dumps(failed["node"]) in json.dumps(first["nodes"])
