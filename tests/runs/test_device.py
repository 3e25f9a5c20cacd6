"""GPUs were asked for, and the nodes have none: the testbed's are pretended, which a cluster's would not be."""

import re
import shutil
from pathlib import Path

import pytest
from support.cluster import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
FLAGS = ("--synthetic", "--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1", "--batch-size=16", "--log-every=1")


@pytest.fixture
def real_cluster(site: Site) -> Site:
    """The testbed by another configuration file, which does not tell that it is one."""
    for name in ("slurm.conf", "gres.conf"):
        shutil.copy(Path(site.slurm_conf).with_name(name), site.path / name)
    return Site(site.path, str(site.path / "slurm.conf"))


def test_nothing_trains_on_a_cpu_unasked(real_cluster: Site) -> None:
    run = real_cluster.submit(*FLAGS)
    run.wait("the end of the attempt", lambda: run.events("attempt_ended"))
    ended = run.events("attempt_ended")[0]
    assert ended["cause"] == "bad_node"
    assert re.search(
        r"local rank 0 on gpu\d\d cannot use the GPU .*: no GPU driver is loaded \(there is no /dev/nv", ended["detail"]
    )
    assert run.steps() == []
    run.cancel()
