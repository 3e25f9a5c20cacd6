"""Runs on a cluster that requeues jobs without a delay, as Slurm can since 25.11: make matrix SLURM=26.05."""

import shutil
import subprocess

import pytest
from support.cluster import SLOW_STEPS, VERY_FEW_EPOCHS, Site, add_script, dead, preempt


def slurm_version() -> list[int]:
    """As `[22, 5, 8]`; empty without Slurm."""
    if not shutil.which("slurmctld"):
        return []
    said = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    return [int(part) for part in said.split()[1].split(".")]


pytestmark = [
    pytest.mark.slurm, pytest.mark.profile("expedited"), pytest.mark.timeout(400),
    pytest.mark.skipif([] < slurm_version() < [25, 11], reason="this Slurm delays each requeued job"),
]  # fmt: skip


def test_run_that_is_preempted_and_loses_its_node_keeps_its_job(ordinary_user: Site, site: Site) -> None:
    run = ordinary_user.submit("--data=data", "--nodes=1", *VERY_FEW_EPOCHS, **SLOW_STEPS)
    run.wait_for_more_steps()
    preempt(run, site)
    run.wait_for_more_steps(2)
    # Without another agent, only Slurm notices that the node has died.
    with dead(site, run.events("claimed")[-1]["nodes"][0]):
        attempts = run.wait_for_state("completed")["attempts"]
    assert [attempt["cause"] for attempt in attempts] == ["preempted", "node_failure", "completed"]
    assert {attempt["job_id"] for attempt in attempts} == {run.job_id}
    assert not run.events("resubmitted")
    run.assert_no_gap()


def test_job_of_a_run_that_fails_ends(site: Site) -> None:
    add_script(site, "crash.py", "raise SystemExit('no luck')\n")
    run = site.submit("--nodes=1", "--name=crash", "--", "crash.py")
    run.wait_for_state("failed")
    run.wait("the end of the job", lambda: not run.is_alive())
    assert "JobState=FAILED" in site.slurm("scontrol", "show", "job", run.job_id)


def test_run_whose_batch_script_is_killed_continues(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, **SLOW_STEPS)
    run.wait_for_more_steps()
    site.slurm("scancel", "--batch", "--signal=KILL", run.job_id)
    first, *_, last = run.wait_for_state("completed")["attempts"]
    assert first["cause"] != "cancelled"
    assert last["cause"] == "completed"
    run.assert_no_gap()
