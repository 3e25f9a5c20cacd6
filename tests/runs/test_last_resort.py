"""Agents that fail or are killed before they can have the run continue: it does, without a supervisor."""

import json
import os
import signal

import pytest
from support.cluster import ENDLESS, SLOW_STEPS, Run, Site, agent_pids

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
ONE_NODE = ("--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1")
# Until a file exists, the agents import for a minute, and handle no signal until then.
SLOW_START = """
import os, sys, time
if "jobs.agent" in sys.orig_argv and not os.path.exists({!r}):
    time.sleep(60)
"""


def wait_for_agent(run: Run, job_id: str) -> int:
    """Wait until the job of one node has started its agent. Returns the agent's process."""

    def found() -> list[int]:
        state, _, node = run.site.slurm("squeue", "-h", f"--jobs={job_id}", "--format=%T %N").partition(" ")
        return agent_pids(run, node) if state == "RUNNING" else []

    run.wait("the agent", found)
    return found()[0]


def test_agents_that_handle_no_signal_yet_and_one_that_is_killed(site: Site) -> None:
    """Whatever ends an agent before it can have its run continue: the job does, once, unless somebody else has."""
    slow, quick = site.path / "slow", site.path / "quick"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_START.format(str(quick)))
    path = os.pathsep.join(filter(None, [str(slow), os.environ.get("PYTHONPATH")]))
    run = site.submit(
        "--data=data", *ENDLESS, *ONE_NODE, "--name=slow", "--continue-with=requeue", PYTHONPATH=path, **SLOW_STEPS
    )

    wait_for_agent(run, run.job_id)
    site.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
    run.wait_for_next_job()
    assert [attempt["cause"] for attempt in run.status()["attempts"]] == ["requeued"]
    assert len(run.events("requeued")) == 1

    # A requeue by somebody else is not repeated.
    wait_for_agent(run, run.job_id)
    site.slurm("scontrol", "requeue", run.job_id)
    run.wait_for_next_job()
    wait_for_agent(run, run.job_id)
    assert "Restarts=2 " in site.slurm("scontrol", "--oneliner", "show", "job", run.job_id)
    assert len(run.events("requeued")) == 1

    # Neither way to cancel the run is taken for a failure.
    assert site.hpc("cancel", "slow").returncode == 0
    run.wait("the end of the job", lambda: not run.is_alive())
    assert run.status()["state"] == "cancelled"
    second = json.loads(site.hpc("resume", "slow", "--json").stdout)["job_id"]
    wait_for_agent(run, second)
    site.slurm("scancel", second)
    run.wait("the end of the job", lambda: not run.is_alive())
    assert run.status()["state"] == "cancelled"
    assert len(run.events("requeued")) == 1

    # One that is killed while its rank trains.
    quick.touch()
    third = Run(site, run.directory, json.loads(site.hpc("resume", "slow", "--json").stdout)["job_id"])
    third.wait_for_steps(5)
    os.kill(wait_for_agent(third, third.job_id), signal.SIGKILL)
    third.wait_for_next_job()
    killed = third.status()["attempts"][-1]
    assert killed["cause"] == "lost"
    assert "SIGKILL" in killed["detail"]
    assert len(run.events("requeued")) == 2
    third.wait_for_more_steps(killed["attempt"] + 1)
    third.assert_no_gap()
    third.cancel()
