"""A scaling study on a real Slurm with a slow network, by an ordinary user."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.cluster import Site, slow_link

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def slow_network(testbed: dict[str, Any]) -> Iterator[None]:
    with ExitStack() as links:
        for node in testbed["nodes"]:
            links.enter_context(slow_link(node["name"], "50mbit"))
        yield


def test_study_measures_the_wait_for_the_network(ordinary_user: Site) -> None:
    flags = ("--data=data", "--nodes", "1", "2", "--cpus-per-gpu=1", "--batch-size=16", "--log-every=1", "--epochs=50")
    done = ordinary_user.hpc("scaling", "--json", "--name=slow", "--minutes=0.1", *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    one, two = found["sizes"]
    assert (one["state"], two["state"]) == ("completed", "completed")
    assert two["allreduce_wait_share"] > 0.1
