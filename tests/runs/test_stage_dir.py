"""Stage directories of other clusters than the usual: scratch of the job's own, a directory that the nodes share."""

from pathlib import Path
from typing import Any

import pytest
from support.cluster import WAITS_AT_FIRST, Run, Site, add_script

pytestmark = pytest.mark.slurm


def submit(site: Site, *flags: str, **environment: str) -> Run:
    add_script(site, "waits.py", WAITS_AT_FIRST)
    fixed = ("--data=data", "--gpus-per-node=1", "--cpus-per-gpu=1", "--name=r")
    return site.submit(*fixed, *flags, "--", "waits.py", **environment)


def staged_on(run: Run, nodes: int) -> list[dict[str, Any]]:
    """What each of so many nodes says of its copy."""
    run.wait("the staging", lambda: len(run.events("staged")) == nodes)
    assert len({event["node"] for event in run.events("staged")}) == nodes
    return run.events("staged")


def test_scratch_of_the_job_is_found_on_the_nodes_and_known_to_vanish(site: Site) -> None:
    # What the prolog of such a cluster does. The login node has such a variable, too.
    scratch = ("--setup=export SLURM_TMPDIR=/tmp/scratch-$SLURM_JOB_ID", "--setup=srun mkdir $SLURM_TMPDIR")
    run = submit(site, "--nodes=1", "--stage-dir=$SLURM_TMPDIR", *scratch, SLURM_TMPDIR="/login")
    [staged] = staged_on(run, 1)
    assert staged["path"].startswith(f"/tmp/scratch-{run.job_id}/torchrelay-")
    assert (staged["per_job"], staged["shared"], staged["in_place"]) == (True, None, None)
    log = run.directory.logs / f"{run.job_id}_0_log.out"
    line = f"/tmp/scratch-{run.job_id} on gpu01 is deleted with this job: the next job copies {site.path}/data again"
    run.wait("what the log says of it", lambda: line in log.read_text())
    run.cancel()


def test_directory_that_the_nodes_share_is_recognised(site: Site) -> None:
    shared = site.path / "disk"
    shared.mkdir()
    run = submit(site, "--nodes=2", f"--stage-dir={shared}")
    staged = staged_on(run, 2)
    assert all(Path(event["path"]).is_relative_to(shared) and not event["per_job"] for event in staged)
    assert {event["shared"] for event in staged} & {"gpu01 uses it too", "gpu02 uses it too"}
    assert any("not on that node's own disk (gpu0" in warning for warning in run.status()["warnings"])
    run.cancel()
