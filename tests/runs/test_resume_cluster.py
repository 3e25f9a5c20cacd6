"""`hpc resume` on another partition, by an ordinary user: `urgent` ends jobs after 30 minutes, or at most 4 hours."""

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


def test_time_limit_is_that_of_the_new_partition_unless_it_was_typed(ordinary_user: Site) -> None:
    add_script(ordinary_user, "a.py", "print('a')\n")
    run = ordinary_user.submit("--gpus-per-node=1", "--cpus-per-gpu=1", "--sbatch=hold", "--", "a.py")
    run.cancel()
    assert resumed(run) == {"partition": "gpu", "limit": "1:00:00"}
    found = resumed(run, "--partition=urgent")
    assert found == {"partition": "urgent", "limit": "30:00", "--partition": "urgent", "--time": "30m"}
    assert resumed(run, "--cpus-per-gpu=2")["limit"] == "30:00", "as before"
    assert resumed(run, "--partition=gpu")["limit"] == "1:00:00"
    assert resumed(run, "--time=2h")["limit"] == "2:00:00"
    found = resumed(run, "--partition=urgent")
    assert found == {"partition": "urgent", "limit": "2:00:00", "--partition": "urgent"}, "2 hours were typed"
