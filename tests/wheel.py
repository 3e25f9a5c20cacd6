"""Uses the wheel on a real Slurm: `make test-wheel`. Its arguments are two environments: `light` and `classifier`.

The light one has the launcher alone, and its script runs in the environment of this process. The other one also has the
extra `classifier`, and trains with it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# A script under plain torchrun: nothing is saved or reported.
ALONE = """
from torchrelay import report, should_stop, state
with state() as saved:
    report(step=1, loss=0.5)
    assert (saved.step, should_stop()) == (0, False)
"""
# What README promises of the launcher alone.
LIGHT_MEGABYTES = 250
# A rank dies in the middle, so that the agents save the snapshot in the nodes' memory.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from torch import distributed, nn
from torchrelay import report, state

distributed.init_process_group("gloo")
assert Path(os.environ["TORCHRELAY_DATA"], "words.txt").read_text() == "staged"
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with state(model=model, optimizer=optimizer) as saved:
    for epoch in saved.epochs(2):
        for batch in saved.batches(range(10)):
            model(torch.ones(4, 8)).mean().backward()
            optimizer.step()
            report(step=saved.step, loss=0.0)
            if (saved.step, distributed.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]) == (15, 1, "0"):
                os.kill(os.getpid(), signal.SIGKILL)
if distributed.get_rank() == 0:
    Path(os.environ["TORCHRELAY_RUN_DIR"], "python").write_text(sys.prefix)
distributed.destroy_process_group()
"""


def start(environment: Path, directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    """A command of `hpc`, in a shell in which the environment of this process is active."""
    command, active = [environment / "bin" / "hpc", *arguments], {**os.environ, "VIRTUAL_ENV": sys.prefix}
    return subprocess.Popen(
        command, cwd=directory, env=active, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answer(command: "subprocess.Popen[str]") -> Any:
    """The document that a command prints."""
    printed, errors = command.communicate()
    assert command.returncode == 0, errors
    return json.loads(printed)


def check_installed(environment: Path, directory: Path, *, has_torch: bool) -> None:
    names = "hpc", "jobs", "training", "torchrelay", "torch"
    code = f"import importlib.util as util; print(*((spec := util.find_spec(x)) and spec.origin for x in {names}))"
    *ours, torch = subprocess.check_output(
        [environment / "bin/python", "-P", "-c", code], cwd=directory, text=True
    ).split()
    assert all(Path(path).is_relative_to(environment) for path in ours), ours
    assert (torch != "None") == has_torch


def check_light(environment: Path, directory: Path) -> None:
    """What the launcher alone refuses, and its size."""
    check_installed(environment, directory, has_torch=False)
    refused = start(environment, directory, "submit", "--nodes=2", "--gpus-per-node=4")
    _, errors = refused.communicate()
    assert (refused.returncode, errors.count("\n")) == (2, 1), errors
    assert "-m pip install 'torchrelay[classifier]', or submit a script of your own: hpc submit " in errors
    assert not (directory / "runs").exists()
    megabytes = sum(path.lstat().st_blocks for path in environment.rglob("*")) / 2048  # blocks of 512 bytes
    assert megabytes < LIGHT_MEGABYTES, megabytes
    print(f"the launcher alone takes {megabytes:.0f} MB")


def main(light: Path, full: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="torchrelay-wheel.", dir="/var/tmp") as name:
        directory = Path(name)
        check_light(light, directory)
        check_installed(full, directory, has_torch=True)
        (directory / "alone.py").write_text(ALONE)
        subprocess.run([full / "bin/torchrun", "--nproc-per-node=2", "alone.py"], cwd=directory, check=True)
        (directory / "train.py").write_text(SCRIPT)
        (directory / "words.txt").write_text("staged")
        subprocess.run(["tar", "--zstd", "-cf", "data.tar.zst", "words.txt"], cwd=directory, check=True)
        answer(start(light, directory, "testbed", "up", "--nodes=4", "--gpus-per-node=4", "--json"))
        try:
            resources = "--nodes=2", "--gpus-per-node=1"
            script = start(
                light, directory, "submit", *resources, "--data=data.tar.zst", "--wait", "--json", "--", "train.py"
            )
            training = start(
                full, directory, "submit", "--nodes=2", "--gpus-per-node=4", "--epochs=2", "--wait", "--json"
            )
            ran, trained = answer(script), answer(training)
            status = ran["status"]
            assert (status["state"], status["step"]) == ("completed", 20), status
            assert [one["cause"] for one in status["interruptions"]] == ["crashed"], status
            assert Path(ran["run_dir"], "python").read_text() == sys.prefix
            status = trained["status"]
            assert (status["state"], status["world_size"]) == ("completed", 8), status
            assert status["test_accuracy"] > 0.8, status
            for run in (ran, trained):
                page = Path(answer(start(light, directory, "report", run["run"], "--json"))["report"])
                assert page.stat().st_size > 0
        finally:
            answer(start(light, directory, "testbed", "down", "--json"))
    print(f"ran a script without the classifier, and trained with it: test accuracy {status['test_accuracy']:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*(Path(argument).resolve() for argument in sys.argv[1:])))
