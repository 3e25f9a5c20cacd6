"""Runs that start before other jobs, or before a maintenance, because their time limit may be shortened."""

import pytest
from support.cluster import SLOW_STEPS, VERY_FEW_EPOCHS, Run, Site

from hpc.base.units import slurm_seconds

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
HOUR = ("--data=data", "--nodes=1", "--time=1h", *VERY_FEW_EPOCHS)


def limit_minutes(run: Run) -> float:
    return (slurm_seconds(run.queue("%l")) or 0) / 60


def stop(run: Run) -> None:
    """Ask an attempt to stop, and wait for the next job."""
    run.site.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
    run.wait_for_next_job()


def test_run_starts_in_a_gap_and_then_gets_its_usual_limit(site: Site) -> None:
    """One node is busy for four minutes, after which a job needs all nodes: only short jobs may start before it."""
    site.slurm("sbatch", "--nodelist=gpu01", "--exclusive", "--time=4", "--output=/dev/null", "--wrap=sleep 240")
    whole = site.slurm("sbatch", "--parsable", "--nodes=4", "--exclusive", "--time=1", "--output=/dev/null", "--wrap=:")
    waits = site.submit(*HOUR, "--name=waits", **SLOW_STEPS)
    run = site.submit(*HOUR, "--name=sooner", "--time-min=2m", **SLOW_STEPS)
    run.wait_for_more_steps()
    assert 2 <= limit_minutes(run) < 5
    assert waits.queue("%T") == "PENDING"
    site.slurm("scancel", whole)
    # A requeue would keep the short limit.
    stop(run)
    assert "--time-min" in run.events("resubmitted")[0]["detail"]
    run.wait_for_more_steps(2)
    assert limit_minutes(run) == 60
    run.wait_for_state("completed")
    waits.wait_for_state("completed")


def test_run_starts_before_a_maintenance(site: Site) -> None:
    at = ("starttime=now+20minutes", "duration=60", "flags=maint,ignore_jobs", "nodes=ALL", "users=root")
    site.slurm("scontrol", "create", "reservation", "reservationname=works", *at)
    try:
        waits = site.submit(*HOUR, "--name=waits", **SLOW_STEPS)
        run = site.submit(*HOUR, "--name=sooner", "--time-min=auto", **SLOW_STEPS)
        run.wait_for_more_steps()
        assert 10 <= limit_minutes(run) < 20
        assert waits.queue("%T") == "PENDING"
        assert "a maintenance begins before its time limit" in site.hpc("status", "waits").stdout
        stop(run)
        run.wait_for_more_steps(2)
        assert 10 <= limit_minutes(run) < 20
        run.wait_for_state("completed")
        waits.cancel()
    finally:
        site.slurm("scontrol", "delete", "reservation=works")
