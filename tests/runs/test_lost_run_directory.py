"""A run directory that its user renames while its job trains: the job ends, and nothing appears again."""

from pathlib import Path

import pytest
from support.cluster import ENDLESS, SLOW_STEPS, Site, agent_pids, rank_pids

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_job_ends_if_its_run_directory_is_renamed(site: Site) -> None:
    run = site.submit("--data=data", *ENDLESS, "--name=lost", **SLOW_STEPS)
    run.wait_for_more_steps()
    path, job = run.directory.path, run.job_id
    pids = [pid for node in run.nodes() for pid in (*agent_pids(run, node), *rank_pids(run, node))]
    assert len(pids) >= 4
    renamed = path.with_name("renamed")
    path.rename(renamed)

    def is_over() -> bool:
        listed = site.slurm("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T")
        return listed in {"CANCELLED", "FAILED"} and not any(Path(f"/proc/{pid}").exists() for pid in pids)

    run.wait("the end of the job", is_over)
    assert not path.exists()
    assert site.slurm("squeue", "--me", "--noheader", "--format=%i") == "", "no other job continues it"
    log = (renamed / "logs" / f"{job}_0_log.out").read_text()
    said = [line for line in log.splitlines() if line.startswith("torchrelay: ") and str(path) in line]
    assert said[-1:] == [f"torchrelay: {path} was deleted, moved or replaced while the run used it: this job ends"]
    assert list(path.parent.iterdir()) == [renamed]
