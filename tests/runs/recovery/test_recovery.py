"""Failures of ranks, and signals, on a real Slurm: the run goes on, and ends with the same weights."""

import json
import os
import signal
import time

import pytest
from support.cluster import (
    ENDLESS,
    TEN_EPOCHS,
    Run,
    Site,
    agent_pids,
    assert_equal,
    assert_nothing_left,
    rank_pids,
)

from hpc.core.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_killed_worker(site: Site, undisturbed: RunDir) -> None:
    run = site.submit("--data=data", "--name=worker", "--nodes=2", *TEN_EPOCHS)
    run.wait_for_steps(20)
    nodes = run.nodes()
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


def test_cancelled_run_is_resumed(site: Site, undisturbed: RunDir) -> None:
    """Not while its job is there; a job that is submitted by hand says so; then with the bits of a run in one go."""
    run = site.submit("--data=data", "--name=paused", "--nodes=2", *TEN_EPOCHS)
    run.wait_for_steps(20)
    busy = site.hpc("resume", "paused", "--time=2h")
    assert (busy.returncode, busy.stderr.count("\n")) == (2, 1)
    assert f"has job {run.job_id}, which is running" in busy.stderr
    run.cancel()
    before = run.steps()
    by_hand = site.slurm("sbatch", "--parsable", str(run.directory.script))
    run.wait("the refusal", lambda: run.events("refused"))
    shown = site.hpc("status", "paused").stdout
    assert f"job {by_hand}: run paused was cancelled, so this job starts nothing: type hpc resume" in shown
    run.wait("the end of that job", lambda: not run.is_alive())
    answer = json.loads(site.hpc("resume", "paused", "--time=2h", "--json").stdout)
    assert answer["changed"] == {"--time": "02:00:00"}
    assert site.slurm("squeue", "--noheader", f"--jobs={answer['job_id']}", "--format=%l") == "2:00:00"
    status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert run.steps()[: len(before)] == before
    assert_equal(undisturbed, run.directory)
    assert [attempt["cause"] for attempt in status["attempts"]] == ["cancelled", "completed"]
    assert status["attempts"][1]["job_id"] == answer["job_id"]
    assert status["steps_lost"] == 0
    assert not any("starts nothing" in warning for warning in status["warnings"])
    assert len(run.events("resumed")) == len(run.events("resubmitted")) == 1
    assert not run.events("requeued")


def test_hung_worker(site: Site, undisturbed: RunDir) -> None:
    run = site.submit("--data=data", "--name=hang", "--nodes=2", "--hang-timeout=5s", *TEN_EPOCHS)
    run.wait_for_steps(20)
    [victim] = rank_pids(run, run.nodes()[1])
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
    run = site.submit("--data=data", "--name=suspended", *ENDLESS, "--hang-timeout=5s")
    run.wait_for_steps(20)
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
    run = site.submit("--data=data", f"--name=term-{moment}", "--nodes=2", *TEN_EPOCHS)
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
    run = site.submit("--data=data", "--name=refused", "--nodes=2", *TEN_EPOCHS)
    run.wait_for_steps(20)
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
# TORCHELASTIC_RESTART_COUNT stays 0 where a torchrun restarts its ranks because another node's have ended.
hung = run / f"hung-{rank}"
for step in range(1, 10**9):
    beat = {"pid": os.getpid(), "rank": rank, "step": step, "phase": "step", "step_seconds": 0.1}
    Path(os.environ["TORCHRELAY_HEARTBEAT"]).write_text(json.dumps(beat))
    if told:
        (run / "stop").touch()
    if (run / "stop").exists():
        sys.exit(0)
    if step == 10 and not hung.exists():
        hung.touch()
        time.sleep(1000)
    time.sleep(0.1)
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
    run = site.submit("--data=data", "--name=twice", *ENDLESS, "--gpus-per-node=2", TORCHRELAY_FAULT="raise@8:3!")
    status = run.wait_for_state("failed")
    assert status["attempts"][-1]["cause"] == "crashed"
    assert status["detail"].startswith("rank 3 on ")
    assert len(run.events("interruption")) == 1
    assert status["budget"]["same_failure_twice"] is True
    assert not run.events("requeued")


def test_bad_node_is_excluded(site: Site) -> None:
    run = site.submit("--data=data", "--name=bad-node", *ENDLESS, TORCHRELAY_FAULT="preflight@0:1")
    run.wait("the requeue", lambda: run.events("requeued"))
    [first] = run.status()["attempts"]
    assert first["cause"] == "bad_node"
    [failed] = [event for event in run.events("rank_failed") if event["cause"] == "bad_node"]
    run.wait(
        "the exclusion", lambda: f"ExcNodeList={failed['node']}" in site.slurm("scontrol", "show", "job", run.job_id)
    )
    assert json.dumps(failed["node"]) in json.dumps(first["nodes"])
