"""`hpc cancel` on a real Slurm: the job ends, whatever the path, the disk or Slurm's commands do."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import ROOT, Run, Site, mounted_volume

pytestmark = pytest.mark.slurm
WAITING = ("--synthetic", "--name=run", "--gpus-per-node=1", "--batch-size=8", "--sbatch=begin=now+1hour")


def is_queued(run: Run) -> bool:
    return run.job_id in run.site.slurm("squeue", "--me", "--noheader", "--format=%A").split()


@pytest.mark.parametrize("hide", ["true", 'mount -t tmpfs none "$1"'], ids=["both paths", "the other path only"])
def test_job_that_was_submitted_by_another_path_is_ended(site: Site, hide: str) -> None:
    run = site.submit(*WAITING)
    runs, other = site.path / "runs", site.path / "other"
    other.mkdir()
    script = f'mount --bind "$1" "$2" && {hide} && exec "$3" -m hpc cancel run --runs-dir "$2"'
    words = ["sh", "-c", script, "sh", str(runs), str(other), sys.executable]
    done = site.type("unshare", "--mount", "--propagation=private", *words, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert not is_queued(run)
    assert run.status()["state"] == "cancelled"


def test_job_of_the_original_survives_the_end_of_a_copy(site: Site) -> None:
    run = site.submit(*WAITING)
    shutil.copytree(run.directory.path, site.path / "copies" / "run")
    done = site.hpc("cancel", "run", "--runs-dir=copies")
    assert done.returncode == 0, done.stderr
    assert is_queued(run)
    run.cancel()


@pytest.fixture
def volume(site: Site) -> Iterator[Path]:
    with mounted_volume(site.path / "volume", "size=200m,mode=755") as path:
        yield path


def test_job_is_ended_on_a_full_disk(site: Site, volume: Path) -> None:
    run = site.submit(*WAITING, "--runs-dir=volume")
    filler = volume / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], check=False, stderr=subprocess.DEVNULL)
    done = site.hpc("cancel", "run", "--runs-dir=volume")
    assert done.returncode == 1
    assert "cancellation cannot be recorded" in done.stderr
    assert "No space left" in done.stderr
    assert not is_queued(run)
    filler.unlink()
    assert site.hpc("cancel", "run", "--runs-dir=volume").returncode == 0
    assert run.status()["state"] == "cancelled"


def test_run_is_cancelled_though_scancel_fails(site: Site) -> None:
    run = site.submit(*WAITING)
    clients = site.path / "bin"
    clients.mkdir()
    (clients / "scancel").write_text("#!/bin/sh\necho scancel: error: Socket timed out >&2; exit 1\n")
    (clients / "scancel").chmod(0o755)
    done = site.hpc("cancel", "run", PATH=f"{clients}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert f"job {run.job_id} may still run: scancel: error: Socket timed out; type hpc" in done.stderr
    assert run.events("cancelled")
    for verb in ("clean", "resume"):
        refused = site.hpc(verb, "run", *(["--yes"] if verb == "clean" else []))
        assert (refused.returncode, f"run run has job {run.job_id}" in refused.stderr) == (2, True), refused.stderr
    run.cancel()
