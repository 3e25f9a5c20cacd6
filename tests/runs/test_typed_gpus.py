"""Runs on a cluster whose nodes have GPUs of two types, or none: gpu01 and gpu02 a100, gpu03 h100, gpu04 none."""

import re

import pytest
from support.cluster import Run, Site, add_script

SCRIPT = """
import os
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
print("ranks:", os.environ["WORLD_SIZE"], "GPUs:", len(gpus.split(",")) if gpus else 0)
"""
pytestmark = [pytest.mark.slurm, pytest.mark.profile("typed"), pytest.mark.timeout(400)]


def assert_ran(run: Run, node: str, ranks: int, gpus: int) -> str:
    """The run has completed there, and its script has seen so many GPUs. Returns what Slurm knows of its job."""
    [attempt] = run.wait_for_state("completed")["attempts"]
    assert attempt["nodes"] == [node]
    assert f"ranks: {ranks} GPUs: {gpus}" in run.directory.rank_log(1, 0).read_text().splitlines()
    return run.site.slurm("scontrol", "show", "job", run.job_id)


def test_gpus_of_a_type_none_and_what_sbatch_is_told_to_request(site: Site) -> None:
    add_script(site, "look.py", SCRIPT)
    script = ("--", "look.py")
    none = site.submit("--gpus-per-node=0", "--name=none", *script)
    typed = site.submit("--nodes=1", "--gpus-per-node=h100:2", "--cpus-per-gpu=1", "--name=typed", *script)
    own = site.submit("--gpus-per-node=0", "--cpus-per-gpu=1", "--sbatch=gres=gpu:h100:1", "--name=own", *script)
    exclusive = ("--sbatch=nodelist=gpu01", "--sbatch=exclusive")
    whole = site.submit("--gpus-per-node=0", "--cpus-per-gpu=1", *exclusive, "--name=whole", *script)
    job = assert_ran(none, "gpu04", ranks=1, gpus=0)
    assert "gres" not in job
    assert "NumCPUs=8 " in job, "all of the node's"
    # 22.05 prints gres:gpu, 24.11 gres/gpu.
    assert re.search("TresPerNode=gres[:/]gpu:h100:2", assert_ran(typed, "gpu03", ranks=2, gpus=2))
    assert_ran(own, "gpu03", ranks=1, gpus=1)
    assert "NumCPUs=8 " in assert_ran(whole, "gpu01", ranks=1, gpus=0), "but no GPU that it did not ask for"
