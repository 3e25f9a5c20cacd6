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
        r"local rank 0 on gpu\d\d cannot use the GPU .*: no GPU driver is loaded \(there is no /dev/nv",
        ended["detail"],
    )
    assert run.steps() == []
    run.cancel()


def test_the_cpu_can_be_asked_for(real_cluster: Site) -> None:
    run = real_cluster.submit(*FLAGS, "--device=cpu")
    run.wait_for_steps(1)
    run.cancel()
    path = str(run.directory.path)
    assert run.status()["device"] == "CPU"
    assert ["device", "CPU"] in [line.split() for line in real_cluster.hpc("status", path).stdout.splitlines()]
    assert real_cluster.hpc("report", path).returncode == 0
    assert "<small>on CPU</small>" in run.directory.report.read_text()
