"""A sweep on a real Slurm, by an ordinary user: its trials are runs, and an interrupted one goes on."""

import json
import time

import pytest
from support.cluster import Site, add_script
from support.events import records_in

from hpc.run.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
ONE = ("--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1")
# The first attempt at the first trial waits to be interrupted.
TRIAL = """
import json, os, sys, time
from pathlib import Path
run, attempt, x = Path(os.environ["TORCHRELAY_RUN_DIR"]), int(os.environ["TORCHRELAY_ATTEMPT"]), float(sys.argv[1])
(run / "metrics").mkdir(exist_ok=True)
with open(run / "metrics" / "train.jsonl", "a") as file:
    print(json.dumps({"step": attempt, "loss": x / attempt, "attempt": attempt}), file=file)
time.sleep(600 if (run.name, attempt) == ("pets-000", 1) else 0)
"""


def test_interrupted_trial_goes_on(ordinary_user: Site) -> None:
    add_script(ordinary_user, "before.py", "")
    add_script(ordinary_user, "trial.py", TRIAL)
    before = ordinary_user.submit(*ONE, "--name=before", "--", "before.py")
    flags = ("--param=x=1,2", "--sampler=grid", "--metric=train/loss", "--after=before", *ONE, "--", "trial.py", "{x}")
    first = RunDir(ordinary_user.path / "runs/pets/pets-000")
    with ordinary_user.started("sweep", "--json", "--name=pets", *flags, errors=None) as controller:
        while not first.train_metrics.exists():
            assert controller.poll() is None
            time.sleep(0.3)
        [job] = [event["job_id"] for event in records_in(first.events) if event["event"] == "submitted"]
        ordinary_user.slurm("scancel", "--signal=TERM", f"{job}.0")
        found = json.loads(controller.communicate()[0])
    assert [one["state"] for one in found["trials"]] == ["completed", "completed"]
    assert (found["best"], [one["value"] for one in found["trials"]]) == ("pets-000", [0.5, 2.0])
    [ended] = [event["time"] for event in before.events("attempt_ended")]
    assert ended < next(event["time"] for event in records_in(first.events) if event["event"] == "claimed")
    runs = json.loads(ordinary_user.hpc("status", "pets", "--json").stdout)
    assert [[attempt["cause"] for attempt in run["attempts"]] for run in runs] == [
        ["requeued", "completed"],
        ["completed"],
    ]
