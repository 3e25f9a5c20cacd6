"""An attempt that a coordinator decides about, with nodes and a clock that a test sets: no network, no waiting."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from hpc.run.events.kinds import RankFailed
from hpc.run.events.ledger import Event
from jobs.control import channel, coordinator, rank_health, rank_starts, root_failure, silent_nodes
from jobs.control.coordinator import Coordinator
from jobs.control.messages import Directive, NodeStatus, Phase, RankHeartbeat, RankStart
from jobs.node_attempt import NodeAttempt
from jobs.stop_request import StopRequest
from support.events import claimed, of_training, record_of, recovery_of, resources_of, write_events
from training.config.train_config import TrainConfig

HOSTS = ("gpu01", "gpu02", "gpu03")


class Clock:
    """A clock that stands still until a test advances it; it replaces those of the coordinator's modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        for module in (coordinator, silent_nodes, rank_health, rank_starts, root_failure):
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
        """Remove the status of a node, as if it had not reported yet."""
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


class CoordinatedAttempt:
    """An attempt whose nodes have trained for a while."""

    def __init__(
        self, node: NodeAttempt, clock: Clock, *events: Event, hosts: Sequence[str] = HOSTS, **spec: Any
    ) -> None:
        usual = {
            **of_training(TrainConfig(data="x")),
            "resources": resources_of(nodes="2:3"),
            "recovery": recovery_of(hang_timeout="60s"),
        }
        self.clock, self.nodes, self.stop = clock, ReportedNodes(len(hosts)), StopRequest()
        write_events(node.run, claimed(clock.now - 900, nodes=hosts), *events, file="attempt-001-node-00.jsonl")
        self.node = replace(
            node,
            spec=replace(node.spec, **{**usual, **spec}),
            # Not on Slurm, which could say how long a silent node is waited for.
            allocation=replace(node.allocation, hostnames=tuple(hosts), cluster="local"),
        )
        self.coordinator = Coordinator(self.node, cast("Any", self.nodes), self.stop)

    def poll(self, seconds: float = 0.0) -> None:
        """Look at the statuses after some seconds."""
        self.clock.advance(seconds)
        for _ in range(2):  # the second time with what the storage has answered
            self.coordinator.poll()
            self.node.storage.finish()

    def beat(self, node_rank: int, **fields: Any) -> RankHeartbeat:
        """Report a heartbeat of the node's rank, which has the same number."""
        usual = {
            "step": 9,
            "phase": "step",
            "state": "S",
            "still_seconds": 0.1,
            "step_seconds": 0.1,
            "busy_seconds": 0.1,
        }
        heartbeat = RankHeartbeat(rank=node_rank, **{**usual, **fields})
        self.nodes.report(node_rank, heartbeats=(heartbeat,))
        return heartbeat

    def start(self, *, ended: Sequence[int] = (), restarts: int = 0) -> None:
        """Report that each node's rank, which has the same number, runs or has ended with exit code 0."""
        for node_rank in self.members:
            start = RankStart(rank=node_rank, restarts=restarts, has_ended=node_rank in ended)
            self.nodes.report(node_rank, starts=(start,))

    def fail(self, node_rank: int, **fields: Any) -> None:
        """Report a failure of the node's rank, and poll again one second later."""
        now = self.clock.now
        usual = {
            "node": self.node.allocation.hostnames[node_rank], "round": 1, "rank": node_rank, "restarts": 0,
            "started_at": now - 30, "failed_at": now, "exit_code": 1, "signal": None, "cause": "crashed", "step": 7,
            "detail": "ValueError: 12 is too much",
        }  # fmt: skip
        self.nodes.report(node_rank, failures=(RankFailed(**{**usual, **fields}),))
        self.poll()
        self.poll(1.0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind, without what every event has."""
        return [
            {name: value for name, value in record_of(event).items() if name not in {"time", "event", "attempt"}}
            for event in self.node.history().during(1).events
            if event.kind == kind
        ]

    @property
    def members(self) -> tuple[int, ...]:
        """Return the node ranks that train."""
        return self.nodes.directive.members

    def is_over(self) -> bool:
        """Whether the coordinator has ended the attempt."""
        return self.nodes.directive.over


AttemptMaker = Callable[..., CoordinatedAttempt]
