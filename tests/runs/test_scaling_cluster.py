"""A scaling study on a real Slurm with a slow network, by an ordinary user."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.cluster import Site, hpc_json

from hpc.core import ledger
from hpc.core.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def slow_network(testbed: dict[str, Any]) -> Iterator[None]:  # noqa: ARG001  # is up first
    hpc_json("testbed", "up", "--shape-network=50mbit")
    yield
    hpc_json("testbed", "up")


def test_study_names_the_network_as_the_limit_and_goes_on_after_a_requeue(ordinary_user: Site) -> None:
    flags = ("--data=data", "--nodes", "1", "2", "--cpus-per-gpu=1", "--batch-size=16", "--log-every=1", "--epochs=50")
    first = RunDir(ordinary_user.path / "runs/slow/slow-1x1")
    with ordinary_user.started("scaling", "--json", "--name=slow", "--minutes=0.2", *flags, errors=None) as controller:
        while not first.train_metrics.exists():
            assert controller.poll() is None
            time.sleep(0.3)
        # hpc status takes so long that the run could end meanwhile.
        [job] = [event["job_id"] for event in ledger.read(first.events) if event["event"] == "submitted"]
        ordinary_user.slurm("scontrol", "requeue", job)
        found = json.loads(controller.communicate()[0])
    one, two = found["sizes"]
    assert (one["state"], two["state"]) == ("completed", "completed")
    attempts = json.loads(ordinary_user.hpc("status", "slow", "--json").stdout)[0]["attempts"]
    assert [attempt["cause"] for attempt in attempts] == ["requeued", "completed"]
    assert two["allreduce_wait_share"] > 0.1
    # What 50 Mbit/s can carry, and the burst that the link lets through at once.
    assert two["allreduce_bytes_per_second"] < 50e6 / 8 * 1.5
    assert "for the all-reduce of" in " ".join(found["conclusions"])
