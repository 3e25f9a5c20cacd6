"""Runs on a cluster whose names lead to a network that is closed between the nodes, and which has few open ports."""

import pytest
from support.cluster import SLOW_STEPS, VERY_FEW_EPOCHS, Run, Site, assert_loses_a_node

PORTS = range(20_000, 21_000)
NETWORK = ("--port-range=20000-20999",)
pytestmark = [pytest.mark.slurm, pytest.mark.profile("addresses"), pytest.mark.timeout(400)]


def test_run_completes_on_the_network_that_works(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, *NETWORK)
    run.wait_for_state("completed")
    staged = run.events("staged")
    assert len(staged) == 2
    assert all(event["bytes_from_peers"] for event in staged), "each had half of the data from the other"
    assert_ports(run)


def assert_ports(run: Run) -> None:
    used = {event["port"] for event in run.events("claimed") + run.events("rendezvous")}
    assert used <= set(PORTS)


def test_run_that_lost_its_first_node_completes_in_a_new_job(site: Site) -> None:
    """On a network that has IPv6 alone."""
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, *NETWORK, "--interface=eth2", **SLOW_STEPS)
    assert_loses_a_node(site, run, 1, place=0)
    claimed = run.events("claimed")
    assert [event["addresses"] for event in claimed] == [[f"fd77::{int(event['nodes'][0][3:])}"] for event in claimed]
    assert_ports(run)


def test_nodes_without_the_interface_are_named_and_avoided(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, *NETWORK, "--interface=ib7")
    run.wait("two ends", lambda: len(run.events("attempt_ended")) >= 2)
    assert run.site.hpc("cancel", str(run.directory.path)).returncode == 0
    first, second = run.events("attempt_ended")[:2]
    assert first["cause"] == second["cause"] == "bad_node"
    assert first["node"] != second["node"]
    assert f"--interface is ib7, but {first['node']} has no such network interface with an address" in first["detail"]
    assert "it has lo, eth0, eth1, eth2" in first["detail"]
