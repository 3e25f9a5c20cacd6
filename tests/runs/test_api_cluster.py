"""The Python API on a real Slurm, from a script of an ordinary user."""

import json
import sys

import pytest
from support.cluster import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
SCRIPT = """
import json, subprocess, time
import hpc

run = hpc.submit(hpc.TrainingRun(
    name="pets", data="data", nodes=1, gpus_per_node=1, cpus_per_gpu=1, batch_size=16, epochs=3, log_every=1,
))
while len(run.metrics()) < 20:
    time.sleep(0.3)
subprocess.run(["scontrol", "requeue", run.status()["job_id"]], check=True)
status = run.wait(timeout_seconds=300)
print(json.dumps([status["state"], [each["cause"] for each in status["attempts"]], list(run.metrics()["step"])]))
"""


def test_script_submits_a_run_and_waits_for_it_over_an_interruption(ordinary_user: Site) -> None:
    with ordinary_user.supervised():  # it ends the two minutes that Slurm holds a requeued job
        done = ordinary_user.type(sys.executable, "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    state, causes, steps = json.loads(done.stdout.splitlines()[-1])
    assert (state, causes, steps) == ("completed", ["requeued", "completed"], list(range(1, 3 * 118 + 1)))
