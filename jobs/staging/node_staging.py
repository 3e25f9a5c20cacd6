"""This node's data: staged together with the other nodes, before the first round. Runs on compute nodes.

The nodes coordinate through the control channel: each reports the state of its copy, and the head node publishes a plan
that says which node reads what (hpc.staging.coordination).
"""

import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.units import duration_seconds
from hpc.staging.coordination import CacheStatus, NodeCache, StagingGroup, StagingPlan, choose_owners
from hpc.staging.copy_progress import CopyProgress
from hpc.staging.stager import Staged, Stager
from jobs.attempt import NodeAttempt, log
from jobs.control.channel import ControlChannel, ControlServer
from jobs.control.messages import OVER
from jobs.ranks.monitor import NodeMonitor
from jobs.ranks.round import find_data
from jobs.staging.packing import pack

# A copy of 100 GB must not look like a hang; one of a second needs no progress events.
_FIRST_SECONDS, _NEXT_SECONDS = 3.0, 10.0
# Nodes whose agents start later than this after the first ones get their data from those.
_GATHER_SECONDS = 10.0


class NodeGroup(StagingGroup):
    """The nodes of one attempt, for one data set, as one of them sees it."""

    def __init__(self, node: NodeAttempt, channel: ControlChannel, source: Path) -> None:
        self._allocation, self._channel, self._source = node.allocation, channel, str(source)
        self.host, self.is_head = node.allocation.host, node.allocation.is_head
        self.has_peers = node.allocation.num_nodes > 1
        self.nonce = node.attempt.nonce
        """The attempt's secret."""
        self._published_at: float | None = None

    def publish_listing(self, version: str, port: int) -> None:
        """On the head node: announce the version, and the port that serves its listing."""
        self._published_at = time.monotonic()
        self._publish(StagingPlan(source=self._source, version=version, lister=(self.host, port)))

    def plan(self) -> StagingPlan | None:
        """The head node's plan; None until this node has received it."""
        self.update()
        return self._current()

    def _current(self) -> StagingPlan | None:
        return next((plan for plan in self._channel.directive.plans if plan.source == self._source), None)

    def report(self, status: CacheStatus, port: int) -> None:
        """Report the state of this node's copy, and the port that serves it."""
        others = tuple(cache for cache in self._channel.status.caches if cache.source != self._source)
        self._channel.report(caches=(*others, NodeCache(source=self._source, status=status, port=port)))

    def withdraw(self) -> None:
        """This node will have no copy, and continues: the others need not wait for its copy, or for its plan."""
        self.report(CacheStatus.UNAVAILABLE, 0)
        if self._current() is None:
            self._publish(StagingPlan(source=self._source, version="", lister=(self.host, 0), owners=(), done=True))

    def update(self) -> None:
        """On the head node: choose the owners once all nodes have reported, and see whether all are done."""
        server, plan = self._channel, self._current()
        if not isinstance(server, ControlServer) or plan is None or plan.done or self._published_at is None:
            return
        statuses = server.statuses()
        busy = {node_rank for node_rank, status in statuses.items() if status.phase not in OVER}
        silent = {node_rank for node_rank in busy if server.is_silent(node_rank)}
        num_expected = self._allocation.num_nodes - (len(statuses) - len(busy)) - len(silent)
        caches = [
            (self._allocation.hostnames[node_rank], cache)
            for node_rank in sorted(busy - silent)
            for cache in statuses[node_rank].caches
            if cache.source == self._source
        ]
        # A node that has never reported must not hold up the others for ever.
        late = time.monotonic() - self._published_at > _GATHER_SECONDS
        complete = late or len(caches) >= num_expected
        if plan.owners is None and complete:
            plan = replace(plan, owners=choose_owners(caches))
        settled = {CacheStatus.COMPLETE, CacheStatus.UNAVAILABLE}
        self._publish(replace(plan, done=complete and all(cache.status in settled for _, cache in caches)))

    def _publish(self, plan: StagingPlan) -> None:
        server = self._channel
        if isinstance(server, ControlServer) and plan != self._current():
            others = tuple(other for other in server.directive.plans if other.source != self._source)
            server.directive = replace(server.directive, plans=(*others, plan))


class NodeStaging:
    """Stages what the ranks of this node need."""

    def __init__(self, node: NodeAttempt, channel: ControlChannel, monitor: NodeMonitor, resources: ExitStack) -> None:
        # The resources keep the copies in use until they are closed, when the attempt is over.
        self.node, self.channel, self.monitor, self._resources = node, channel, monitor, resources

    def stage_data(self) -> Path | None:
        """Stage the run's data on this node's disk; None if the run reads none.

        Raises:
            StagingStopped: the agent was asked to stop, or the attempt is over.
            TorchrelayError: the data can be read neither from the disk nor in place.
        """
        spec = self.node.spec
        if spec.data is None:
            return None
        source = Path(spec.data)
        staged = self.stage(source)
        if staged.in_place:
            log(f"reading {source} in place: {staged.in_place}")
        if spec.pack is None:
            return staged.path
        if staged.in_place:
            raise TorchrelayError(f"{staged.in_place}, so they cannot be packed either: submit with --pack off")
        began, watch = time.monotonic(), _Watch(self.node, self.monitor, source)
        packed = pack(Path(spec.stage_dir), self._resources, find_data(staged.path), spec.pack, watch)
        seconds = round(time.monotonic() - began, 3)
        self.node.record_event("packed", node=self.node.host, path=str(packed), seconds=seconds)
        return packed

    def stage(self, source: Path) -> Staged:
        """Stage one source, and record how it went. Raises as `stage_data` does."""
        node, group = self.node, NodeGroup(self.node, self.channel, source)
        if group.is_head:
            self.monitor.callbacks.append(group.update)
        stager = Stager(
            Path(node.spec.stage_dir),
            group=group,
            watch=_Watch(node, self.monitor, source),
            keep_seconds=duration_seconds("--stage-keep", node.spec.stage_keep),
        )
        self._resources.enter_context(stager)
        try:
            staged = stager.stage(source)
        except (TorchrelayError, OSError):
            group.withdraw()
            raise
        fields = {**asdict(staged), "path": str(staged.path), "seconds": round(staged.seconds, 3)}
        node.record_event("staged", node=node.host, source=str(source), **fields)
        if staged.fallback:
            log(f"read from shared storage instead of other nodes: {staged.fallback}")
        if staged.in_memory:
            log(f"{node.spec.stage_dir} on {node.host} is RAM-backed: add the size of the data set to --mem")
        return staged


class _Watch:
    """Polls the monitor while a copy is made, and records progress."""

    def __init__(self, node: NodeAttempt, monitor: NodeMonitor, source: Path) -> None:
        self._node, self._monitor, self._source = node, monitor, source
        self._next = time.monotonic() + _FIRST_SECONDS

    def __call__(self, progress: CopyProgress | None) -> bool:
        """Returns whether to stop."""
        self._monitor.poll()
        if progress is not None and time.monotonic() > self._next:
            self._next = time.monotonic() + _NEXT_SECONDS
            self._node.record_event(
                "staging", node=self._node.host, source=str(self._source), activity=progress.activity,
                bytes_done=progress.bytes_done, bytes_total=progress.bytes_total,
                bytes_per_second=round(progress.rate), eta_seconds=progress.eta_seconds,
            )  # fmt: skip
        return self._monitor.must_leave
