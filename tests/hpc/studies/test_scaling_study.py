"""`hpc scaling` without Slurm."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from support.cluster import Site, add_script, refused

pytestmark = pytest.mark.timeout(400)
LOCAL = ("--cluster=local", "--cpus-per-gpu=1")
# It does not end by itself.
SPEED = """
import json, os, sys, time
from pathlib import Path
assert sys.argv[1] == os.environ["WORLD_SIZE"]
assert Path.cwd().name == "inner"
metrics = Path(os.environ["TORCHRELAY_RUN_DIR"], "metrics")
metrics.mkdir(exist_ok=True)
for step in range(10_000):
    if os.environ["RANK"] == "0":
        with open(metrics / "train.jsonl", "a") as file:
            speed = 100 * int(sys.argv[1])
            print(json.dumps({"step": step, "images_per_second": speed, "attempt": 1, "time": time.time()}), file=file)
    time.sleep(0.2)
"""
# An unmodified script, which does not end by itself either.
STEPS = """
import time, torch
weight = torch.nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD([weight])
while True:
    weight.grad = torch.ones(())
    optimizer.step()
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def site(local_site: Site) -> Site:
    add_script(local_site, "steps.py", STEPS)
    add_script(local_site, "inner/speed.py", SPEED)
    return local_site


def scaling(site: Site, *arguments: str) -> dict[str, Any]:
    done = site.hpc("scaling", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_study_survives_its_controller(site: Site) -> None:
    flags = ("--data=data", "--epochs=20", "--batch-size=16", "--log-every=1", "--val-split=0.2", "--minutes=0.05")
    sizes = ("--nodes", "1", "2", "--gpus-per-node", "1")
    command = (sys.executable, "-m", "hpc", "scaling", "--name=small", *sizes, *LOCAL, *flags)
    first, second = (site.path / "runs/small" / name for name in ("small-1x1", "small-2x1"))
    with subprocess.Popen(command, cwd=site.path) as controller:
        while not (first / "metrics/train.jsonl").exists():
            assert controller.poll() is None
            time.sleep(0.1)
        controller.send_signal(signal.SIGKILL)
    assert not second.exists()
    found = scaling(site, "--name=small")
    one, two = found["sizes"]
    assert (one["run"], one["state"], one["ranks"], one["batch_size"]) == ("small-1x1", "completed", 1, 16)
    assert (two["run"], two["state"], two["ranks"], two["batch_size"]) == ("small-2x1", "completed", 2, 32)
    for each in (one, two):
        assert each["images_per_second"] > 0
    assert one["efficiency"] == 1.0
    rows = json.loads(site.hpc("status", "small", "--json").stdout)
    assert [row["run"] for row in rows] == ["small-1x1", "small-2x1"]
    assert "small-1x1" in site.hpc("status").stdout
    assert json.loads(site.hpc("status", "small-2x1", "--json").stdout)[0]["run_dir"] == str(second)
    shown = site.hpc("scaling", "--name=small").stdout
    assert all(word in shown for word in ("1x1", "2x1", "images per second", "scaling efficiency"))


@pytest.mark.slow
def test_script_is_ended_after_its_time(site: Site) -> None:
    script = ("--", "speed.py", "{ranks}")
    flags = ("--nodes=1,2", "--parallel=2", "--minutes=0.05", *LOCAL)
    found = scaling(replace(site, path=site.path / "inner"), "--name=own", "--runs-dir=../runs", *flags, *script)
    assert [(each["images_per_second"], each["efficiency"]) for each in found["sizes"]] == [(100, 1.0), (200, 1.0)]
    assert {each["state"] for each in found["sizes"]} == {"cancelled"}


@pytest.mark.slow
def test_unmodified_script_is_measured_by_its_steps(site: Site) -> None:
    found = scaling(site, "--name=steps", "--nodes=1,2", "--minutes=0.2", *LOCAL, "--", "steps.py")
    one, two = found["sizes"]
    assert {each["state"] for each in (one, two)} == {"cancelled"}
    assert 0 < two["steps_per_second"] <= 6  # one in 0.2 s at most; the counter may be read late
    assert (one["speed"], two["speed"]) == (one["steps_per_second"], 2 * two["steps_per_second"])
    assert two["efficiency"] == two["steps_per_second"] / one["steps_per_second"]
    shown = site.hpc("scaling", "--name=steps")
    assert "steps per second" in shown.stdout
    assert "images per second" not in shown.stdout


def test_wrong_command_lines_leave_nothing(site: Site) -> None:
    before = sorted(site.path.glob("runs/*"))
    flags = (*LOCAL, "--data=data")
    for arguments, says in (
        (("--nodes=1,2", *flags), "the scaling study has no name: add --name NAME"),
        (("--name=x",), "there is no scaling study x in runs: add --nodes 1 2 4 to start one"),
        (("--name=x", "--nodes", "1", *flags), "there is one size only"),
        (("--name=x", "--nodes=1,2", "--minutes=0", *flags), "--minutes is 0"),
        (("--name=x", "--nodes=1,2", "--wait", *flags), "has no --dry-run and no --wait"),
        (("--name=x", "--nodes=1,2", *LOCAL, "--data=nowhere"), "nowhere"),
    ):
        assert says in refused(site, "scaling", *arguments)
    assert sorted(site.path.glob("runs/*")) == before
