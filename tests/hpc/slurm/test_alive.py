"""Which jobs of a run are alive."""

from pathlib import Path

from hpc.run.causes import JobState
from hpc.run.rundir import RunDir
from hpc.slurm.alive import slurm_jobs
from hpc.slurm.squeue import SlurmJob


def test_jobs_are_sorted_by_their_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.events.mkdir(parents=True)
    run.script.touch()
    jobs = {
        number: SlurmJob(job_id=number, state=JobState.RUNNING, reason="", nodes="gpu01", command=str(run.script))
        for number in ("100000", "99999")
    }
    assert slurm_jobs(run, jobs) == ["99999", "100000"]
