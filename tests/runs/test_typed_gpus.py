"""Runs on a cluster whose nodes have GPUs of two types, or none: gpu01 and gpu02 a100, gpu03 h100, gpu04 none."""

import json
import re

import pytest
from support.cluster import (
    SMALL_BATCH,
    THREE_EPOCHS,
    Site,
    add_script,
    assert_preempted,
    assert_survives_a_node,
    preempt,
)

SCRIPT = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'] or 'none', 'of', os.environ['WORLD_SIZE'])\n"
PROFILE = "typed"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture
def script(site: Site) -> str:
    add_script(site, "look.py", SCRIPT)
    return "look.py"


def test_gpus_of_a_type(site: Site, script: str) -> None:
    run = site.submit("--nodes=1", "--gpus-per-node=h100:2", "--cpus-per-gpu=1", "--name=typed", "--", script)
    [attempt] = run.wait_for_state("completed")["attempts"]
    assert attempt["nodes"] == ["gpu03"]
    # 22.05 prints gres:gpu, 24.11 gres/gpu.
    assert re.search("TresPerNode=gres[:/]gpu:h100:2", site.slurm("scontrol", "show", "job", run.job_id))
    assert "sees 0,1 of 2" in site.hpc("logs", "typed", "--all").stdout


def test_preempted_run_on_gpus_of_a_type_completes(site: Site) -> None:
    run = site.submit(*THREE_EPOCHS, "--gpus-per-node=a100:1")
    run.wait_for_steps(20)
    preempt(run)
    run.wait_for_release()
    assert_preempted(run)
    assert [event["nodes"] for event in run.events("claimed")] == [["gpu01", "gpu02"]] * 2


def test_run_that_lost_a_node_continues_on_gpus_of_another_type(site: Site) -> None:
    run = assert_survives_a_node(site)
    assert "gpu03" in run.events("claimed")[1]["nodes"], "of the others one is dead, and one has no GPUs"


def test_doctor_runs_on_nodes_of_several_types(site: Site) -> None:
    done = site.hpc("doctor", "--node", "--nodes=1", "--gpus-per-node=h100:1", "--json")
    assert "gpu03" in {one["where"] for one in json.loads(done.stdout)}


def test_types_that_the_partition_lacks_are_refused(site: Site) -> None:
    for gpus in ("v100:2", "h100:5"):
        done = site.hpc("submit", "--data=data", f"--gpus-per-node={gpus}")
        assert (done.returncode, done.stdout) == (2, "")
        has = "partition gpu has a100:4, h100:4 per node: use one of these, or fewer"
        assert done.stderr == f"hpc submit: --gpus-per-node is {gpus}, but {has}\n"
    done = site.hpc("submit", "--data=data", "--nodes=2", "--gpus-per-node=h100:2")
    assert "but partition gpu has 1 with 2 or more h100 GPUs: use --nodes 1 or fewer" in done.stderr


def test_training_without_gpus_goes_to_the_node_without(site: Site) -> None:
    run = site.submit("--data=data", *SMALL_BATCH, "--epochs=1", "--gpus-per-node=0", "--log-every=1")
    status = run.wait_for_state("completed")
    assert (status["attempts"][0]["nodes"], status["world_size"]) == (["gpu04"], 1)
    job = site.slurm("scontrol", "show", "job", run.job_id)
    assert "gres" not in job
    assert "NumCPUs=8 " in job, "all of the node's"


def test_exclusive_job_gets_whole_nodes_and_no_gpus_it_did_not_ask_for(site: Site, script: str) -> None:
    flags = ("--gpus-per-node=0", "--cpus-per-gpu=1", "--sbatch=nodelist=gpu01", "--sbatch=exclusive")
    run = site.submit(*flags, "--name=whole", "--", script)
    run.wait_for_state("completed")
    job = site.slurm("scontrol", "show", "job", run.job_id)
    assert "NumCPUs=8 " in job
    assert "sees none of 1" in site.hpc("logs", "whole", "--all").stdout


def test_gres_of_the_users_own(site: Site, script: str) -> None:
    run = site.submit("--gpus-per-node=0", "--sbatch=gres=gpu:h100:1", "--name=own", "--", script)
    [attempt] = run.wait_for_state("completed")["attempts"]
    assert attempt["nodes"] == ["gpu03"]
    assert "sees 0 of 1" in site.hpc("logs", "own", "--all").stdout
