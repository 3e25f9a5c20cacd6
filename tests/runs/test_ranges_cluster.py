"""Runs on a cluster of 32 nodes with three digits in their names, which Slurm abbreviates: gpu[001-032]."""

import re

import pytest
from support.cluster import TWO_NODES, Site, add_script

pytestmark = [pytest.mark.slurm, pytest.mark.profile("ranges", "--nodes=32"), pytest.mark.timeout(400)]
# A job on all 32, with as many torchruns, takes 13 GB: benchmarks/nodes.py has one.
NODES = [f"gpu{number:03d}" for number in range(7, 13)]
# Without torch, which is slow to import on the few cores that there are: the preflight does it, in which all ranks
# share a sum.
SCRIPT = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename)
"""


def test_run_on_a_range_of_nodes(site: Site) -> None:
    add_script(site, "prints.py", SCRIPT)
    run = site.submit("--nodes=6", *TWO_NODES[1:], "--exclude=gpu[001-006,013-032]", "--", "prints.py")
    run.wait("the start", lambda: run.events("claimed"))
    assert run.queue("%N") == "gpu[007-012]"
    [attempt] = run.wait_for_state("completed")["attempts"]
    assert attempt["nodes"] == attempt["members"] == NODES
    assert {event["world_size"] for event in run.events("preflight")} == {6}
    assert "gpu007 ... gpu012 (6)" in site.hpc("status", str(run.directory.path)).stdout
    printed = re.findall(
        r"rank (\d+) of 6 on (gpu\d+)$", site.hpc("logs", str(run.directory.path)).stdout, re.MULTILINE
    )
    assert sorted(printed) == sorted((str(rank), name) for rank, name in enumerate(NODES))
