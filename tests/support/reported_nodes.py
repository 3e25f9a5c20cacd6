"""The nodes of an attempt as its coordinator hears of them, without a network, and a clock that a test advances."""

from dataclasses import replace
from typing import Any

import pytest

from jobs.control import channel, coordinator, patience, rank_health, root_failure
from jobs.control.messages import Directive, NodeStatus, Phase


class Clock:
    """A clock that stands still until a test advances it; it replaces those of the coordinator's modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        for module in (coordinator, patience, rank_health, root_failure):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(coordinator, "steady_time", self.monotonic)

    def monotonic(self) -> float:
        """Return the seconds since the epoch, too: the coordinator has both kinds of time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class ReportedNodes:
    """Stands for a ControlServer: a test says what the nodes have reported, and how long they have been silent."""

    def __init__(self, num_nodes: int) -> None:
        self.directive = Directive(round=1, members=tuple(range(num_nodes)), host="10.0.0.1", port=1)
        running = (
            NodeStatus(node_rank=rank, phase=Phase.RUNNING, round=1, port=100 + rank) for rank in range(num_nodes)
        )
        self._statuses = {status.node_rank: status for status in running}
        self.silent = dict.fromkeys(range(num_nodes), 0.0)
        """Seconds of silence by node rank."""
        self.ended = set[int]()
        """Silent nodes whose kernel has said that their agent has ended."""

    def report(self, node_rank: int, **changes: Any) -> None:
        """Change a node's status."""
        self._statuses[node_rank] = replace(self._statuses[node_rank], **changes)

    def forget(self, node_rank: int) -> None:
        """Have a node that has not reported yet."""
        del self._statuses[node_rank]

    def statuses(self) -> dict[int, NodeStatus]:
        """As ControlServer.statuses."""
        return dict(self._statuses)

    def silent_seconds(self, node_rank: int) -> float | None:
        """As ControlServer.silent_seconds."""
        return self.silent[node_rank] if node_rank in self._statuses else None

    def is_silent(self, node_rank: int) -> bool:
        """As ControlServer.is_silent."""
        return (self.silent_seconds(node_rank) or 0.0) > channel.LOST_SECONDS

    def has_ended(self, node_rank: int) -> bool:
        """As ControlServer.has_ended."""
        return node_rank in self.ended

    def address(self, node_rank: int) -> str:
        """As ControlServer.address."""
        return f"10.0.0.{node_rank + 1}"
