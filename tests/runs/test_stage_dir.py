"""Stage directories of other clusters than the usual: scratch of the job's own."""

import pytest
from support.cluster import WAITS_AT_FIRST, Site, add_script

pytestmark = pytest.mark.slurm


def test_scratch_of_the_job_is_found_on_the_nodes(site: Site) -> None:
    # What the prolog of such a cluster does. The login node has such a variable, too.
    scratch = ("--setup=export SLURM_TMPDIR=/tmp/scratch-$SLURM_JOB_ID", "--setup=srun mkdir $SLURM_TMPDIR")
    add_script(site, "waits.py", WAITS_AT_FIRST)
    flags = ("--data=data", "--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1", "--stage-dir=$SLURM_TMPDIR")
    run = site.submit(*flags, *scratch, "--", "waits.py", SLURM_TMPDIR="/login")
    run.wait("the staging", lambda: run.events("staged"))
    [staged] = run.events("staged")
    assert staged["path"].startswith(f"/tmp/scratch-{run.job_id}/torchrelay-")
    assert staged["in_place"] is None
    run.cancel()
