"""A script that is submitted by hand as more than one job: it says so, and leaves the run as it is."""

import pytest
from support.cluster import Site

pytestmark = pytest.mark.slurm


def test_run_is_one_job(site: Site) -> None:
    # Its own job does not start yet.
    run = site.submit("--data=data", "--gpus-per-node=1", "--name=it's", "--sbatch=begin=now+1hour")
    before = sorted(path.name for path in run.directory.events.iterdir())
    for flags in (["--array=0-1"], ["--nodes=1", ":", "--nodes=1", "--begin=now"]):
        site.slurm("sbatch", "--begin=now", *flags, str(run.directory.script))
    run.wait("the end of the other jobs", lambda: site.slurm("squeue", "--me", "-h", "--format=%i") == run.job_id)
    printed = [path.read_text().splitlines()[-1] for path in run.directory.logs.glob("*_log.out")]
    problem = "torchrelay: this job is a part of a job array or a heterogeneous job, or was submitted in one, "
    advice = f"type sbatch {run.directory.script}, without --array and outside of such a job"
    assert printed == [f"{problem}but a run is one job. Nothing was started: {advice}"] * 3
    assert sorted(path.name for path in run.directory.events.iterdir()) == before
    assert run.status()["state"] == "pending"
