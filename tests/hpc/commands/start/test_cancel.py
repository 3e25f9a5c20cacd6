"""`hpc cancel` on a real Slurm: the job ends, whatever the path, the disk or Slurm's commands do; a refused resume."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.cluster import ROOT, Run, Site, fill, mounted_volume
from support.fake_slurm import write_programs

from hpc.run.events.resumption import current_spec

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


def test_job_is_ended_on_a_full_disk(site: Site) -> None:
    with mounted_volume(site.path / "volume", "size=200m,mode=755") as volume:
        run = site.submit(*WAITING, "--runs-dir=volume")
        filler = fill(volume)
        done = site.hpc("cancel", "run", "--runs-dir=volume")
        assert done.returncode == 1
        assert "cancellation cannot be recorded" in done.stderr
        assert "No space left" in done.stderr
        assert not is_queued(run)
        filler.unlink()
        assert site.hpc("cancel", "run", "--runs-dir=volume").returncode == 0
        assert run.status()["state"] == "cancelled"


def test_run_is_cancelled_though_its_copy_was_and_scancel_fails(site: Site) -> None:
    run = site.submit(*WAITING)
    shutil.copytree(run.directory.path, site.path / "copies" / "run")
    copied = site.hpc("cancel", "run", "--runs-dir=copies")
    assert copied.returncode == 0, copied.stderr
    assert is_queued(run), "the job is that of the original"
    path = write_programs(site.path / "bin", scancel="echo scancel: error: Socket timed out >&2; exit 1")
    done = site.hpc("cancel", "run", PATH=path)
    assert done.returncode == 1
    assert f"job {run.job_id} may still run: scancel: error: Socket timed out; type hpc" in done.stderr
    assert run.events("cancelled")
    with ThreadPoolExecutor() as pool:  # each waits a minute for the end of the job
        ended = [pool.submit(site.hpc, *words, "run") for words in (["clean", "--yes"], ["resume"])]
    for refused in (future.result() for future in ended):
        assert (refused.returncode, f"run run has job {run.job_id}" in refused.stderr) == (2, True), refused.stderr
    run.cancel()


def test_resumption_that_slurm_refuses_changes_nothing(site: Site) -> None:
    run = site.submit(*WAITING)
    run.cancel()
    script, code = run.directory.script.read_bytes(), run.directory.code.stat().st_ino
    done = site.hpc("resume", "run", "--sbatch=nodelist=nosuchnode", "--new-code")
    assert done.returncode == 1
    assert "run run stays as it was: " in done.stderr
    assert "Invalid node name" in done.stderr
    assert (run.directory.script.read_bytes(), run.directory.code.stat().st_ino) == (script, code)
    assert current_spec(run.directory) == run.directory.spec
    assert run.status()["state"] == "cancelled"
    assert site.hpc("resume", "run", "--mem=100M").returncode == 0
    assert current_spec(run.directory) == run.directory.revised_spec(1)
    run.cancel()
