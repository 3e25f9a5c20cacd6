"""How long silent nodes are waited for, with Slurm's commands as shell scripts that answer as Slurm did."""

import threading
import time
from dataclasses import replace

import pytest
from cluster import Command

from hpc.spec import Resources
from jobs.control.patience import IDLE_SECONDS, LINK_SECONDS, Patience
from jobs.node_attempt import NodeAttempt

NODES = """
case $* in
*%P*) printf 'gpu01|gpu*|mixed\\ngpu02|gpu*|{silent}\\n{others}' ;;
*) printf 'gpu02|{silent}\\n' ;;
esac
"""
IDLE = "gpu03|gpu*|idle\\ngpu04|gpu*|idle\\n"
BUSY = "gpu03|gpu*|allocated\\ngpu04|gpu*|idle\\n"


@pytest.fixture
def pair(node: NodeAttempt) -> NodeAttempt:
    """The part of a node of a run that needs two."""
    return replace(node, spec=replace(node.spec, resources=Resources(nodes="2")))


def seconds_once_slurm_has_answered(pair: NodeAttempt) -> float:
    asked = Patience(pair)
    assert asked.seconds(["gpu02"]) == LINK_SECONDS, "nobody waits for Slurm"
    deadline = time.monotonic() + 30
    while any(thread.name == "patience" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return asked.seconds(["gpu02"])


def test_node_that_slurm_has_marked_down_is_dead(pair: NodeAttempt, slurm_command: Command) -> None:
    slurm_command("sinfo", NODES.format(silent="down*", others=BUSY))
    assert seconds_once_slurm_has_answered(pair) == 0.0


def test_silent_node_may_have_lost_its_link(pair: NodeAttempt, slurm_command: Command) -> None:
    slurm_command("sinfo", NODES.format(silent="mixed*", others=BUSY))
    assert seconds_once_slurm_has_answered(pair) == LINK_SECONDS


def test_idle_nodes_shorten_the_wait(pair: NodeAttempt, slurm_command: Command) -> None:
    slurm_command("sinfo", NODES.format(silent="mixed*", others=IDLE))
    assert seconds_once_slurm_has_answered(pair) == IDLE_SECONDS


def test_controller_that_is_away_changes_nothing(pair: NodeAttempt, slurm_command: Command) -> None:
    slurm_command("sinfo", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    assert seconds_once_slurm_has_answered(pair) == LINK_SECONDS
