"""How long silent nodes are waited for, with Slurm's commands as shell scripts that answer as Slurm did."""

import threading
import time
from pathlib import Path

import pytest
from cluster import Command

from hpc.core.attempts import Attempt
from hpc.core.ledger import EventWriter
from hpc.core.rundir import RunDir
from hpc.spec import Resources, RunSpec
from jobs.control.patience import IDLE_SECONDS, LINK_SECONDS, Patience
from jobs.node_attempt import NodeAllocation, NodeAttempt

NODES = """
case $* in
*%P*) printf 'gpu01|gpu*|mixed\\ngpu02|gpu*|{silent}\\n{others}' ;;
*) printf 'gpu02|{silent}\\n' ;;
esac
"""
IDLE = "gpu03|gpu*|idle\\ngpu04|gpu*|idle\\n"
BUSY = "gpu03|gpu*|allocated\\ngpu04|gpu*|idle\\n"


@pytest.fixture
def node(tmp_path: Path) -> NodeAttempt:
    return NodeAttempt(
        run=RunDir(tmp_path),
        spec=RunSpec(
            name="r", cluster="slurm", data=None, stage_dir="/tmp", resources=Resources(nodes="2"), script=("a.py",)
        ),
        allocation=NodeAllocation(
            cluster="slurm", job_id="7", restart=0, node_rank=0, hostnames=("gpu01", "gpu02"), cpus=1
        ),
        attempt=Attempt(attempt=1, job_id="7", restart=0, nonce="n", port=1, nodes=("gpu01", "gpu02"), started=1.0),
        writer=EventWriter(tmp_path / "events" / "node.jsonl"),
    )  # fmt: skip


def seconds_once_slurm_has_answered(node: NodeAttempt) -> float:
    asked = Patience(node)
    assert asked.seconds(["gpu02"]) == LINK_SECONDS, "nobody waits for Slurm"
    deadline = time.monotonic() + 30
    while any(thread.name == "patience" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return asked.seconds(["gpu02"])


def test_node_that_slurm_has_marked_down_is_dead(node: NodeAttempt, slurm_command: Command) -> None:
    slurm_command("sinfo", NODES.format(silent="down*", others=BUSY))
    assert seconds_once_slurm_has_answered(node) == 0.0


def test_silent_node_may_have_lost_its_link(node: NodeAttempt, slurm_command: Command) -> None:
    slurm_command("sinfo", NODES.format(silent="mixed*", others=BUSY))
    assert seconds_once_slurm_has_answered(node) == LINK_SECONDS


def test_idle_nodes_shorten_the_wait(node: NodeAttempt, slurm_command: Command) -> None:
    slurm_command("sinfo", NODES.format(silent="mixed*", others=IDLE))
    assert seconds_once_slurm_has_answered(node) == IDLE_SECONDS


def test_controller_that_is_away_changes_nothing(node: NodeAttempt, slurm_command: Command) -> None:
    slurm_command("sinfo", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    assert seconds_once_slurm_has_answered(node) == LINK_SECONDS
