"""`hpc shell` beside a script: on the nodes of a real Slurm."""

import json
import os
import pty
import sys
import time

import pytest
from support.cluster import TIMEOUT_SECONDS, TWO_NODES, Run, Site, add_script, refused

# It logs for ever.
BUSY = """
import itertools, os, time
from pathlib import Path
metrics = Path(os.environ["TORCHRELAY_RUN_DIR"], "metrics")
metrics.mkdir(exist_ok=True)
for step in itertools.count(1):
    if os.environ["RANK"] == "0":
        with open(metrics / "train.jsonl", "a") as file:
            print(f'{{"step": {step}, "attempt": 1}}', file=file)
    time.sleep(0.05)
"""


def typed_into_shell(run: Run, node: str, line: str) -> str:
    """What a terminal shows until `hpc shell`, into which one types a line and exit, has ended with 0."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(run.site.path)
        environment = {**os.environ, "SLURM_CONF": run.site.slurm_conf, "SHELL": "/bin/sh", "PS1": "$ "}
        words = [sys.executable, "-m", "hpc", "shell", run.directory.name, f"--node={node}"]
        os.execve(words[0], words, environment)
    os.write(terminal, f"{line}; exit\n".encode())
    shown, deadline = b"", time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            block = os.read(terminal, 65536)
        except OSError:  # so a Linux pseudo-terminal says that the other end is closed
            break
        if not block:
            break
        shown += block
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0, shown.decode(errors="replace")
    return shown.decode(errors="replace")


@pytest.mark.slurm
def test_shell_runs_beside_the_ranks(site: Site) -> None:
    add_script(site, "busy.py", BUSY)
    run = site.submit("--name=run", *TWO_NODES, "--", "busy.py")
    run.wait_for_steps(2)
    nodes = run.nodes()

    shown = typed_into_shell(run, nodes[1], "echo on=$SLURMD_NODENAME job=$SLURM_JOB_ID in=$PWD tty=$(tty)")
    assert f"on={nodes[1]} job={run.job_id} in={run.directory.path} tty=/dev/pts/" in shown
    assert f"--node is 'gpu99', but run run runs on {nodes[0]}, {nodes[1]}" in refused(
        site, "shell", "run", "--node=gpu99"
    )
    without_terminal = ("sh", "-c", 'exec "$@" < /dev/null', "sh", sys.executable, "-m", "hpc", "shell", "run")
    assert "hpc shell needs a terminal" in site.type(*without_terminal).stderr
    command = json.loads(site.hpc("shell", "run", "--json").stdout)["command"]
    assert command[:3] == ["srun", f"--jobid={run.job_id}", "--overlap"]
    assert f"--nodelist={nodes[0]}" in command

    before = len(run.steps())
    run.wait_for_steps(before + 2)
    assert len(run.events("claimed")) == 1, "the script went on"
    run.cancel()
    waits = site.submit("--name=waits", *TWO_NODES, "--sbatch=hold", "--", "busy.py")
    for name in ("run", "waits"):
        assert f"run {name} has no running job: hpc status {name} says why" in refused(site, "shell", name)
    waits.cancel()
