"""`hpc resume` on another partition, by an ordinary user."""

import json

import pytest
from support.cluster import Run, Site, add_script

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def resumed(run: Run, *flags: str) -> dict[str, str]:
    """What has changed."""
    done = run.site.hpc("resume", run.directory.name, "--json", *flags)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    partition, limit = run.site.slurm("squeue", f"--jobs={answer['job_id']}", "--noheader", "--format=%P %l").split()
    run.cancel()
    return {"partition": partition, "limit": limit, **answer["changed"]}


def test_run_continues_on_another_partition_and_keeps_its_time_limit(ordinary_user: Site) -> None:
    add_script(ordinary_user, "a.py", "print('a')\n")
    run = ordinary_user.submit("--gpus-per-node=1", "--cpus-per-gpu=1", "--sbatch=hold", "--", "a.py")
    run.cancel()
    found = resumed(run, "--partition=urgent")
    assert found == {"partition": "urgent", "limit": "1:00:00", "--partition": "urgent"}
    assert resumed(run, "--time=2h") == {"partition": "urgent", "limit": "2:00:00", "--time": "2h"}
