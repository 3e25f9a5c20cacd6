"""Nodes that are lost on a real Slurm: the run goes on, and ends with the same weights."""

import subprocess
import time

import pytest
from support.cluster import TEN_EPOCHS, Site, assert_equal, dead

from hpc.core.files import read_json_lines
from hpc.core.rundir import RunDir
from hpc.slurm.client import TESTBED_DIRECTORY
from jobs.control.channel import LOST_SECONDS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_lost_node_is_replaced_by_a_spare(site: Site, undisturbed: RunDir) -> None:
    run = site.submit("--data=data", "--name=spare", "--nodes=2", "--spares=1", *TEN_EPOCHS)
    run.wait_for_steps(20)
    nodes = run.nodes()
    # The first two that are ready train.
    [first] = [event["members"] for event in run.events("rendezvous")]
    [spare] = {0, 1, 2} - set(first)
    gone = next(rank for rank in first if rank != 0)
    lost = nodes[gone]
    with dead(site, lost):
        status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert_equal(undisturbed, run.directory)
    assert [attempt["cause"] for attempt in status["attempts"]] == ["completed"]
    assert [event["members"] for event in run.events("rendezvous")] == [
        first,
        [*(rank for rank in first if rank != gone), spare],
    ]
    [interruption] = status["interruptions"]
    assert (interruption["cause"], interruption["node"]) == ("node_failure", lost)
    assert interruption["steps_lost"] <= 6


def test_the_others_go_on_without_a_lost_node(site: Site, undisturbed: RunDir) -> None:
    run = site.submit("--data=data", "--name=elastic", "--nodes=3", "--elastic", *TEN_EPOCHS)
    run.wait_for_steps(20)
    nodes = run.nodes()
    with dead(site, nodes[2]):
        status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert [attempt["cause"] for attempt in status["attempts"]] == ["completed"]
    assert {line["world_size"] for line in read_json_lines(run.directory.train_metrics)} == {3, 2}
    assert samples_by_step(run.directory) == samples_by_step(undisturbed), "on whatever number of ranks"


def samples_by_step(run: RunDir) -> dict[int, list[int]]:
    """The images of each step, as they were used by the last ranks that made it."""
    world = {line["step"]: line["world_size"] for line in read_json_lines(run.train_metrics)}
    found: dict[int, dict[int, list[int]]] = {}
    for path in sorted((run.path / "metrics" / "samples").glob("*.jsonl")):
        rank = int(path.stem.rpartition("-")[2])
        for line in read_json_lines(path):
            found.setdefault(line["step"], {})[rank] = line["indices"]
    return {step: sorted(index for rank in range(world[step]) for index in found[step][rank]) for step in sorted(world)}


@pytest.mark.parametrize("which", ["head", "other"])
def test_lost_node_of_a_run_that_needs_all(site: Site, undisturbed: RunDir, which: str) -> None:
    """Whoever is left hands the run to a new job, long before Slurm notices."""
    run = site.submit("--data=data", f"--name=lost-{which}", "--nodes=2", *TEN_EPOCHS)
    run.wait_for_steps(20)
    nodes = run.nodes()
    with dead(site, nodes[0 if which == "head" else 1]):
        run.wait("the new job", lambda: run.events("resubmitted"))
        status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert_equal(undisturbed, run.directory)
    first, second = status["attempts"]
    assert (first["cause"], second["cause"]) == ("node_failure", "completed")
    [resubmitted] = run.events("resubmitted")
    assert (first["job_id"], second["job_id"]) == (run.job_id, resubmitted["job_id"]) != (run.job_id, run.job_id)
    assert not set(resubmitted["excluded"]) & set(second["nodes"])
    assert not run.events("requeued")
    assert status["interruptions"][0]["steps_lost"] <= 6
    run.wait("the end of the crippled job", lambda: run.job_id not in site.slurm("squeue", "--me", "-h", "-o%A"))


@pytest.mark.parametrize("which", ["head", "other"])
def test_node_that_loses_its_link_for_seconds_comes_back(site: Site, undisturbed: RunDir, which: str) -> None:
    run = site.submit("--data=data", f"--name=link-{which}", "--nodes=2", *TEN_EPOCHS)
    run.wait_for_steps(20)
    node = run.nodes()[0 if which == "head" else 1]
    link = ("nsenter", f"--net={TESTBED_DIRECTORY / 'ns' / node}.net", "ip", "link", "set", "eth0")
    subprocess.run([*link, "down"], check=True)
    try:
        time.sleep(LOST_SECONDS + 3)
    finally:
        subprocess.run([*link, "up"], check=True)
    status = run.wait_for_state("completed")
    run.assert_no_gap()
    assert_equal(undisturbed, run.directory)
    [attempt] = status["attempts"]
    assert (attempt["job_id"], attempt["cause"]) == (run.job_id, "completed")
    assert [event["node"] for event in run.events("node_returned")] == [attempt["nodes"][1]]
    [interruption] = status["interruptions"]
    assert (interruption["cause"], interruption["steps_lost"] <= 6) == ("node_failure", True)
    assert not run.events("resubmitted")
