"""`hpc shell` and `hpc top` beside a script: on the nodes of a real Slurm, and on this machine."""

import json
import os
import pty
import sys
import time
from pathlib import Path

import pytest
from support.cluster import TIMEOUT_SECONDS, TWO_NODES, Run, Site, add_script, refused

from hpc.commands.runs.top import parse

# It works and logs for ever.
BUSY = """
import json, os, time
from pathlib import Path
metrics = Path(os.environ["TORCHRELAY_RUN_DIR"], "metrics")
metrics.mkdir(exist_ok=True)
step = 0
while True:
    step += 1
    sum(range(500_000))
    if os.environ["RANK"] == "0":
        with open(metrics / "train.jsonl", "a") as file:
            print(json.dumps({"step": step, "attempt": 1}), file=file)
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
def test_shell_and_top_run_beside_the_ranks(site: Site) -> None:
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

    ranks = json.loads(site.hpc("top", "run", "--json").stdout)
    assert [(rank["rank"], rank["node"]) for rank in ranks] == list(enumerate(nodes))
    assert all(rank["cpu_percent"] > 0 and rank["processes"] >= 2 for rank in ranks)
    table = site.hpc("top", "run").stdout.splitlines()
    assert table[0].split() == ["rank", "node", "CPU", "processes", "GPU", "busy", "memory"]
    assert [line.split()[:2] for line in table[1:]] == [[str(rank), node] for rank, node in enumerate(nodes)]

    before = len(run.steps())
    run.wait_for_steps(before + 2)
    assert len(run.events("claimed")) == 1, "the script went on"
    run.cancel()
    waits = site.submit("--name=waits", *TWO_NODES, "--sbatch=hold", "--", "busy.py")
    for name in ("run", "waits"):
        for verb in ("shell", "top"):
            assert f"run {name} has no running job: hpc status {name} says why" in refused(site, verb, name)
    waits.cancel()


def test_run_on_this_machine(shared: Path) -> None:
    site = Site(shared, "/nonexistent")
    add_script(site, "busy.py", BUSY)
    two_ranks = ("--nodes=1", "--gpus-per-node=2", "--cpus-per-gpu=1")
    run = site.submit("--cluster=local", "--name=run", *two_ranks, "--", "busy.py")
    run.wait_for_steps(2)
    ranks = json.loads(site.hpc("top", "run", "--json").stdout)
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(rank["cpu_percent"] > 0 for rank in ranks)
    assert "run run has no job: it runs on this machine" in refused(site, "shell", "run")
    run.cancel()
    assert "run run is not running: hpc status run shows its state" in refused(site, "top", "run")


def test_lines_of_the_cluster_among_the_answers_are_skipped() -> None:
    answer = {"node": "gpu01", "ranks": [{"rank": 0}]}
    printed = f'Welcome to the cluster\n[1, 2]\n{json.dumps(answer)}\n{{"node": "gpu02", "ra'
    assert parse(printed) == {"gpu01": [{"rank": 0}]}
