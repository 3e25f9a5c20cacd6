"""A run of one to three nodes loses one, then its first node: each step trains on the images of a run on one node."""

import pytest
from support.cluster import SLOW_STEPS, VERY_FEW_EPOCHS, Site, dead

from hpc.base.files import read_json_lines
from hpc.run.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def samples_by_step(run: RunDir) -> dict[int, list[int]]:
    """The images of each step, as they were used by the last ranks that made it."""
    world = {line["step"]: line["world_size"] for line in read_json_lines(run.train_metrics)}
    found: dict[int, dict[int, list[int]]] = {}
    for path in sorted((run.path / "metrics" / "samples").glob("*.jsonl")):
        rank = int(path.stem.rpartition("-")[2])
        for line in read_json_lines(path):
            found.setdefault(line["step"], {})[rank] = line["indices"]
    return {step: sorted(index for rank in range(world[step]) for index in found[step][rank]) for step in sorted(world)}


def test_run_goes_on_with_fewer_nodes_and_in_another_job_without_its_first_node(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=1:3", *VERY_FEW_EPOCHS, **SLOW_STEPS)
    alone = site.submit("--data=data", "--name=alone", *VERY_FEW_EPOCHS, "--cluster=local", "--nodes=1")
    run.wait_for_more_steps()
    nodes = run.nodes()
    assert len(nodes) == 3, "as many as are free"
    with dead(site, nodes[2]):
        run.wait("the others' start", lambda: len(run.events("train_started")) == 2)
        run.wait_for_more_steps()
    assert run.attempts_logged() == [1]
    assert {line["world_size"] for line in read_json_lines(run.directory.train_metrics)} == {3, 2}
    with dead(site, nodes[0]):
        # Whoever is left hands the run to a new job, long before Slurm notices.
        run.wait("the new job", lambda: run.events("resubmitted"))
        status = run.wait_for_state("completed")
    alone.wait_for_state("completed")
    run.assert_no_gap()
    assert samples_by_step(run.directory) == samples_by_step(alone.directory), "on whatever number of ranks"

    old, new = status["attempts"]
    assert (old["cause"], new["cause"]) == ("node_failure", "completed")
    [resubmitted] = run.events("resubmitted")
    assert (old["job_id"], new["job_id"]) == (run.job_id, resubmitted["job_id"]) != (run.job_id, run.job_id)
    assert not {nodes[0], *resubmitted["excluded"]} & set(new["nodes"])
    assert not run.events("requeued")
    assert [(one["cause"], one["node"]) for one in status["interruptions"]] == [
        ("node_failure", nodes[2]),
        ("node_failure", nodes[0]),
    ]
    assert max(one["steps_lost"] for one in status["interruptions"]) <= 6, (
        "the snapshot interval, and the step under way"
    )
    run.wait(
        "the end of the crippled job", lambda: run.job_id not in site.slurm("squeue", "--me", "-h", "-o%A").split()
    )
