"""What a submission that fails removes, and what it must not: what a queued job needs."""

import re
from pathlib import Path

from support.cluster import Site
from support.fake_slurm import SINFO, write_programs

LOST_REPLY = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
SUBMIT = ("submit", "--synthetic", "--name=run", "--gpus-per-node=1", "--batch-size=8")


def test_refused_submission_removes_the_run(shared: Path) -> None:
    refusal = "echo 'sbatch: error: invalid' >&2; exit 1"
    path = write_programs(shared / "bin", sbatch=refusal, sinfo=SINFO, squeue="exit 0", scontrol="exit 1")
    done = Site(shared, "/nonexistent").hpc(*SUBMIT, "--runs-dir=new/runs", PATH=path)
    assert (done.returncode, "sbatch refused the job: invalid" in done.stderr) == (2, True), done.stderr
    assert list((shared / "new/runs").iterdir()) == []


def test_unanswered_submission_keeps_what_its_job_may_need(shared: Path) -> None:
    away = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    fails = {"scontrol": "exit 1", "sacct": "exit 1"}  # the real ones would wait for a Slurm
    path = write_programs(shared / "bin", sbatch=LOST_REPLY, sinfo=SINFO, squeue=away, **fails)
    done = Site(shared, "/nonexistent").hpc(*SUBMIT, PATH=path)
    assert done.returncode == 1, done.stderr
    assert re.search(r"Socket timed out.*Unable to contact.*hpc cancel", done.stderr)
    assert (shared / "runs" / "run" / "submit.sbatch").exists()
