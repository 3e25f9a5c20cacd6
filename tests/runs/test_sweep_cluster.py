"""A sweep on a real Slurm, by an ordinary user: its trials are runs, and an interrupted one goes on."""

import json
import time

import pytest
from support.cluster import Site

from hpc.core import ledger
from hpc.core.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_requeued_trial_goes_on(ordinary_user: Site) -> None:
    training = (
        "--data=data", "--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1", "--batch-size=16", "--log-every=1",
    )  # fmt: skip
    before = ordinary_user.submit(*training, "--epochs=1", "--name=before")
    flags = ("--param=lr=0.05,1e-7", "--sampler=grid", "--metric=train/loss", "--epochs=8", "--after=before", *training)
    first = RunDir(ordinary_user.path / "runs/pets/pets-000")
    with ordinary_user.started("sweep", "--json", "--name=pets", *flags, errors=None) as controller:
        while not first.train_metrics.exists() or len(first.train_metrics.read_text().splitlines()) < 20:
            assert controller.poll() is None
            time.sleep(0.3)
        # hpc status takes so long that the trial could end meanwhile.
        [job] = [event["job_id"] for event in ledger.read(first.events) if event["event"] == "submitted"]
        ordinary_user.slurm("scontrol", "requeue", job)
        found = json.loads(controller.communicate()[0])
    assert [one["state"] for one in found["trials"]] == ["completed", "completed"]
    assert found["best"] == "pets-000"
    [ended] = [event["time"] for event in before.events("attempt_ended")]
    assert ended < next(event["time"] for event in ledger.read(first.events) if event["event"] == "claimed")
    runs = json.loads(ordinary_user.hpc("status", "pets", "--json").stdout)
    assert [[attempt["cause"] for attempt in run["attempts"]] for run in runs] == [
        ["requeued", "completed"],
        ["completed"],
    ]
    steps = [json.loads(line)["step"] for line in first.train_metrics.read_text().splitlines()]
    assert steps[-1] == 8 * 118
