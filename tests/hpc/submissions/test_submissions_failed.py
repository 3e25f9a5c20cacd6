"""What a submission that fails removes, and what it must not: other runs, and what a queued job needs."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.cluster import ROOT, Site
from support.fake_slurm import SINFO, write_programs

from hpc.run.rundir import RunDir

LOST_REPLY = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
SUBMIT = ("submit", "--synthetic", "--name=run", "--gpus-per-node=1", "--batch-size=8")


def test_refused_submission_removes_the_directories_that_it_made(shared: Path) -> None:
    refusal = "echo 'sbatch: error: invalid' >&2; exit 1"
    path = write_programs(shared / "bin", sbatch=refusal, sinfo=SINFO, squeue="exit 0", scontrol="exit 1")
    (shared / "own").mkdir()
    for runs in ("new/runs", "own"):
        done = Site(shared, "/nonexistent").hpc(*SUBMIT, f"--runs-dir={runs}", PATH=path)
        assert (done.returncode, "sbatch refused the job: invalid" in done.stderr) == (2, True), done.stderr
    assert sorted(path.name for path in shared.iterdir()) == ["bin", "own"]
    assert list((shared / "own").iterdir()) == [], "an empty directory of the user's own stays"


def test_three_at_once_of_which_one_is_refused(shared: Path) -> None:
    """Of processes that make the same missing directories at the same moment."""
    sbatch = 'case "$1" in */bad/*) echo "sbatch: error: invalid" >&2; exit 1;; esac; echo Submitted batch job 7'
    path = write_programs(shared / "bin", sbatch=sbatch, sinfo=SINFO, squeue="exit 0", scontrol="exit 1")
    environment = {**os.environ, "PATH": path, "SLURM_CONF": "/nonexistent", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "hpc", *SUBMIT, "--cluster=slurm", "--runs-dir", str(shared / "runs")]
    several = [
        subprocess.Popen([*words, f"--name={name}"], cwd=shared, env=environment, stderr=subprocess.DEVNULL)
        for name in ("one", "bad", "two")
    ]
    assert [one.wait() for one in several] == [0, 2, 0]
    runs = shared / "runs"
    assert sorted(path.name for path in runs.glob("[!.]*")) == ["one", "two"]
    for run in map(RunDir, runs.glob("[!.]*")):
        assert run.spec.exists()
        assert run.script.exists()


def test_unanswered_submission_keeps_what_its_job_may_need(shared: Path) -> None:
    away = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    fails = {"scontrol": "exit 1", "sacct": "exit 1"}  # the real ones would wait for a Slurm
    path = write_programs(shared / "bin", sbatch=LOST_REPLY, sinfo=SINFO, squeue=away, **fails)
    done = Site(shared, "/nonexistent").hpc(*SUBMIT, PATH=path)
    assert done.returncode == 1, done.stderr
    assert re.search(r"Socket timed out.*Unable to contact.*hpc cancel", done.stderr)
    assert (shared / "runs" / "run" / "submit.sbatch").exists()
