"""How long silent nodes are waited for, with Slurm's commands as shell scripts that answer as Slurm did."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster import Command
from support.waiting import wait_for

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
def seconds(node: NodeAttempt, slurm_command: Command, tmp_path: Path) -> Callable[[str], float]:
    """The patience with gpu02, a node of a run that needs two, once Slurm has answered as `script`."""

    def seconds(script: str) -> float:
        asked = tmp_path / "asked"
        slurm_command("sinfo", f"until [ -e {asked} ]; do sleep 0.02; done\n{script}")
        patience = Patience(replace(node, spec=replace(node.spec, resources=Resources(nodes="2"))))
        assert patience.seconds(["gpu02"]) == LINK_SECONDS, "nobody waits for Slurm"
        asked.touch()
        wait_for(lambda: not any(thread.name == "patience" for thread in threading.enumerate()))
        return patience.seconds(["gpu02"])

    return seconds


def test_node_that_slurm_has_marked_down_is_dead(seconds: Callable[[str], float]) -> None:
    assert seconds(NODES.format(silent="down*", others=BUSY)) == 0.0


def test_silent_node_may_have_lost_its_link(seconds: Callable[[str], float]) -> None:
    assert seconds(NODES.format(silent="mixed*", others=BUSY)) == LINK_SECONDS


def test_idle_nodes_shorten_the_wait(seconds: Callable[[str], float]) -> None:
    assert seconds(NODES.format(silent="mixed*", others=IDLE)) == IDLE_SECONDS


def test_controller_that_is_away_changes_nothing(seconds: Callable[[str], float]) -> None:
    assert seconds("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1") == LINK_SECONDS
