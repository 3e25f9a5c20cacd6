"""Agents that fail or are killed before they can have the run continue: it does, without a supervisor."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cluster import ENDLESS, SMALL_BATCH, Run, Site, agent_pids

from hpc.slurm.client import TESTBED_DIRECTORY
from hpc.testbed.nodes import processes

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
ONE_NODE = ("--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1")
# The agents of the job's first start import for a minute: until then they handle no signal.
SLOW_START = """
import os, sys, time
if "jobs.agent" in sys.orig_argv and "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(60)
"""


def submit_with_slow_agents(site: Site, *flags: str) -> Run:
    """A run whose agents have just been started and handle no signal yet."""
    (site.path / "slow").mkdir()
    (site.path / "slow" / "sitecustomize.py").write_text(SLOW_START)
    path = os.pathsep.join(filter(None, [str(site.path / "slow"), os.environ.get("PYTHONPATH")]))
    run = site.submit("--data=data", *SMALL_BATCH, "--epochs=1", *flags, PYTHONPATH=path)
    run.wait("the agent", lambda: run.queue("%T") == "RUNNING" and agent_pids(run, run.queue("%N")[:5]))
    return run


def test_signal_before_the_agents_can_handle_it_costs_one_requeue(site: Site) -> None:
    run = submit_with_slow_agents(site, *ONE_NODE)
    site.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
    run.wait_for_release()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["requeued", "completed"]
    assert status["job_id"] == run.job_id
    assert len(run.events("requeued")) == 1


@pytest.mark.parametrize("how", ["scancel", "hpc cancel"])
def test_cancelled_before_the_agents_can_handle_it(site: Site, how: str) -> None:
    run = submit_with_slow_agents(site, *ONE_NODE)
    if how == "scancel":
        site.slurm("scancel", run.job_id)
    else:
        assert site.hpc("cancel", str(run.directory.path)).returncode == 0
    run.wait("the end of the job", lambda: not run.is_alive())
    assert run.status()["state"] == "cancelled"
    assert not run.events("requeued")


def test_requeue_by_somebody_else_is_not_repeated(site: Site) -> None:
    run = submit_with_slow_agents(site, *ONE_NODE)
    site.slurm("scontrol", "requeue", run.job_id)
    run.wait_for_release()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]][-1] == "completed"
    assert "Restarts=1 " in site.slurm("scontrol", "--oneliner", "show", "job", run.job_id)
    assert not run.events("requeued")


def test_killed_agent_of_a_single_node(site: Site) -> None:
    run = site.submit("--data=data", *ENDLESS, *ONE_NODE)
    run.wait_for_steps(20)
    [agent] = agent_pids(run, run.queue("%N"))
    os.kill(agent, signal.SIGKILL)
    run.wait_for_release()
    stopped = run.steps()[-1]
    run.wait_for_steps(stopped + 5)
    run.assert_no_gap()
    first, second = run.status()["attempts"]
    assert (first["cause"], second["cause"]) == ("lost", None)
    assert "SIGKILL" in first["detail"]
    assert len(run.events("requeued")) == 1
    run.cancel()


def test_failed_run_stays_failed(site: Site) -> None:
    (site.path / "crash.py").write_text("raise SystemExit('no luck')\n")
    for command in (("git", "init", "-q"), ("git", "add", "crash.py")):
        assert site.type(*command).returncode == 0
    run = site.submit(*ONE_NODE, "--name=crash", "--", "crash.py")
    run.wait_for_state("failed")
    run.wait("the end of the job", lambda: not run.is_alive())
    assert "JobState=FAILED" in site.slurm("scontrol", "show", "job", run.job_id)
    assert len(run.status()["attempts"]) == 1
    assert not Path(run.directory.path, "final").exists()


@contextmanager
def planted_by_another_user(node: str) -> Iterator[None]:
    """On a node, our directories in memory and in /tmp belong to somebody else."""
    [process, *_] = processes(TESTBED_DIRECTORY / "ns" / f"{node}.net")
    planted = [f"/proc/{process}/root/{parent}/torchrelay-0" for parent in ("dev/shm", "tmp")]
    for path in planted:
        Path(path).mkdir(mode=0o700, exist_ok=True)
        os.chown(path, 65534, 65534)
    try:
        yield
    finally:
        for path in planted:
            os.chown(path, 0, 0)


def test_node_without_a_private_directory_is_excluded(site: Site) -> None:
    with planted_by_another_user("gpu01"):
        run = site.submit("--data=data", *SMALL_BATCH, "--epochs=1", *ONE_NODE)
        run.wait("the exclusion", lambda: run.events("excluded"))
        run.wait_for_release()
        status = run.wait_for_state("completed")
    first, second = status["attempts"]
    assert (first["cause"], first["nodes"], second["cause"]) == ("bad_node", ["gpu01"], "completed")
    assert "belongs to nobody" in first["detail"]
    assert second["nodes"] != ["gpu01"]
