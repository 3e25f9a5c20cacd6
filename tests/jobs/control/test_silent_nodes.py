"""How long silent nodes are waited for, with Slurm's commands as shell scripts that answer as Slurm did."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster import Command
from support.events import resources_of
from support.waiting import wait_for

from hpc.run.events.kinds import NodeLost
from jobs.control import silent_nodes
from jobs.control.silent_nodes import Patience
from jobs.node_attempt import NodeAttempt

NODES = """
case $* in
*%P*) printf 'gpu01|gpu*|mixed\\ngpu02|gpu*|{silent}\\n{others}' ;;
*) printf 'gpu02|{silent}\\n' ;;
esac
"""
IDLE = "gpu03|gpu*|idle\\ngpu04|gpu*|idle\\n"
QUEUE = "Dependency\\nResources\\n"
BUSY = "gpu03|gpu*|allocated\\ngpu04|gpu*|idle\\n"


@pytest.fixture
def seconds(node: NodeAttempt, slurm_command: Command, tmp_path: Path) -> Callable[[str], float]:
    """The patience with gpu02, a node of a run that needs two, once Slurm has answered as `script`."""

    def seconds(script: str, queue: str = QUEUE) -> float:
        slurm_command("squeue", f"printf '{queue}'")
        asked = tmp_path / "asked"
        slurm_command("sinfo", f"until [ -e {asked} ]; do sleep 0.02; done\n{script}")
        patience = Patience(replace(node, spec=replace(node.spec, resources=resources_of(nodes="2"))))
        assert patience.seconds(["gpu02"]) == 45.0, "nobody waits for Slurm"
        asked.touch()
        wait_for(lambda: not any(thread.name == "patience" for thread in threading.enumerate()))
        return patience.seconds(["gpu02"])

    return seconds


@pytest.mark.parametrize(
    ("silent", "others", "queue", "waits"),
    [
        ("down*", BUSY, QUEUE, 0.0), ("mixed*", BUSY, QUEUE, 45.0), ("mixed*", IDLE, QUEUE, 0.0),
        ("mixed*", BUSY, "Dependency\\n", 0.0), ("mixed*", "", "", 45.0),
    ],
    ids=[
        "marked down: dead", "it may have lost its link, and others wait", "idle nodes may replace it",
        "an idle node may replace it, and nobody waits for this job's other node", "no node may replace it",
    ],
)  # fmt: skip
def test_silent_node_is_waited_for(
    seconds: Callable[[str, str], float], silent: str, others: str, queue: str, waits: float
) -> None:
    assert seconds(NODES.format(silent=silent, others=others), queue) == waits


def test_nodes_that_the_job_cannot_use_shorten_nothing(node: NodeAttempt, slurm_command: Command) -> None:
    """The silent node itself, those that the user excludes, and those of another partition."""
    listed = "\n".join(f"gpu0{number}|{name}|idle" for number, name in enumerate(["big"] * 4 + ["gpu*"] * 2, 1))
    slurm_command("sinfo", f"case $* in *%P*) echo '{listed}';; *) echo 'gpu02|idle*';; esac")
    slurm_command("scontrol", 'case "$*" in "show hostnames gpu0[3-4]") echo gpu03; echo gpu04;; esac')
    settings: list[tuple[str, dict[str, Any]]] = [("1:4", {}), ("2", {"exclude": "gpu0[3-4]"}), ("4", {})]
    patiences = [
        Patience(
            replace(node, spec=replace(node.spec, resources=resources_of(nodes=nodes, partition="big", **excluded)))
        )
        for nodes, excluded in settings
    ]
    for patience in patiences:
        patience.seconds(["gpu02"])
    wait_for(lambda: not any(thread.name == "patience" for thread in threading.enumerate()))
    assert [each.seconds(["gpu02"]) for each in patiences] == [0.0, 45.0, 45.0]


@pytest.mark.parametrize(
    ("nodes", "reported", "waits"),
    [("1:2", "gpu02", 45.0), ("1:2", "gpu01", 0.0), ("2", "gpu02", 0.0)],
    ids=["the first node continues without this one", "the first node is lost", "too few nodes are left to continue"],
)
def test_node_that_is_cut_off_from_an_elastic_run_waits_for_its_link(
    node: NodeAttempt,
    slurm_command: Command,
    monkeypatch: pytest.MonkeyPatch,
    nodes: str,
    reported: str,
    waits: float,
) -> None:
    monkeypatch.setattr(silent_nodes, "_REPORT_SECONDS", 0.0)
    slurm_command("sinfo", NODES.format(silent="idle", others=IDLE))
    first = replace(node, allocation=replace(node.allocation, hostnames=("gpu01", "gpu02")))
    node.run.events.mkdir()
    first.record(NodeLost(node=reported, last_heard=1.0, detail=f"lost contact with {reported}"))
    spec = replace(node.spec, resources=resources_of(nodes=nodes))
    patience = Patience(replace(first, allocation=replace(first.allocation, node_rank=1), spec=spec))
    patience.seconds(["gpu01"])
    wait_for(lambda: not any(thread.name == "patience" for thread in threading.enumerate()))
    assert patience.seconds(["gpu01"]) == waits


def test_slurm_is_asked_every_five_seconds(
    node: NodeAttempt, slurm_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(silent_nodes, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    slurm_command("sinfo", f"echo >> {tmp_path}/asked; {NODES.format(silent='down*', others=BUSY)}")
    patience = Patience(node)
    for _ in range(3):
        patience.seconds(["gpu02"])
        wait_for(lambda: not any(thread.name == "patience" for thread in threading.enumerate()))
    first = (tmp_path / "asked").read_text()
    clock[0] += 5.0
    patience.seconds(["gpu02"])
    clock[0] += 0.25
    patience.seconds(["gpu02"])
    wait_for(lambda: not any(thread.name == "patience" for thread in threading.enumerate()))
    assert (tmp_path / "asked").read_text() == 2 * first


def test_pretended_nodes_are_not_waited_for(node: NodeAttempt) -> None:
    local = replace(node, allocation=replace(node.allocation, cluster="local"))
    assert Patience(local).seconds(["localhost"]) == 0.0


def test_controller_that_is_away_changes_nothing(
    seconds: Callable[[str], float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert seconds("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1") == 45.0
    assert "Slurm does not report the state of gpu02: Unable to contact" in capsys.readouterr().out
