"""`hpc shell` and `hpc top` beside a training: on the nodes of a real Slurm, and on this machine."""

import json
import os
import pty
import sys
import time
from pathlib import Path

import pytest
from support.cluster import ENDLESS, TIMEOUT_SECONDS, Run, Site, refused, tiny_data

from hpc.top import parse

WAITING = ("--synthetic", "--name=waits", "--gpus-per-node=1", "--batch-size=8", "--sbatch=begin=now+1hour")


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
    run = site.submit("--data=data", "--name=run", *ENDLESS)
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
    assert len(run.events("claimed")) == 1, "the training went on"
    run.cancel()
    for verb in ("shell", "top"):
        assert "run run has no running job: hpc status run says why" in refused(site, verb, "run")


@pytest.mark.slurm
def test_run_that_waits_has_no_node(site: Site) -> None:
    run = site.submit(*WAITING)
    for verb in ("shell", "top"):
        assert "run waits has no running job" in refused(site, verb, "waits")
    run.cancel()


def test_run_on_this_machine(shared: Path) -> None:
    tiny_data(shared / "data")
    site = Site(shared, "/nonexistent")
    run = site.submit("--data=data", "--cluster=local", "--name=run", *ENDLESS)
    run.wait_for_steps(2)
    ranks = json.loads(site.hpc("top", "run", "--json").stdout)
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(rank["cpu_percent"] > 0 for rank in ranks)
    assert "run run has no job: it runs on this machine" in refused(site, "shell", "run")
    run.cancel()
    assert "run run does not run: hpc status run shows its state" in refused(site, "top", "run")


def test_lines_of_the_cluster_among_the_answers_are_skipped() -> None:
    answer = {"node": "gpu01", "ranks": [{"rank": 0}]}
    printed = f'Welcome to the cluster\n[1, 2]\n{json.dumps(answer)}\n{{"node": "gpu02", "ra'
    assert parse(printed) == {"gpu01": [{"rank": 0}]}
