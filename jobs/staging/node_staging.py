"""Stages this node's data together with the other nodes, before the first round. Runs on compute nodes.

The nodes coordinate through the control channel: each reports the state of its copy, and the first node publishes a
plan that says which node reads what (jobs.staging.coordination).
"""

import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from hpc.base.errors import TorchrelayError
from hpc.run.events.kinds import DataStaged, Staging
from jobs.control.channel import ControlChannel, ControlServer
from jobs.control.messages import OVER
from jobs.node_attempt import NodeAttempt, log
from jobs.ranks.monitor import NodeMonitor
from jobs.staging.coordination import Address, CacheStatus, NodeCache, StagingGroup, StagingPlan, choose_owners
from jobs.staging.copy_progress import CopyProgress, Watch
from jobs.staging.stager import Staged, Stager

# A copy of 100 GB must not look like a hang; one of a second needs no progress events.
_FIRST_SECONDS, _NEXT_SECONDS = 3.0, 10.0
# A node that reports later than this after the listing gets its data from the nodes that have reported.
_GATHER_SECONDS = 10.0


class NodeGroup(StagingGroup):
    """One node's view of the nodes of an attempt while they stage one data set."""

    def __init__(self, node: NodeAttempt, channel: ControlChannel, source: Path) -> None:
        self._allocation, self._channel, self._source = node.allocation, channel, str(source)
        self.host, self.is_first, self.has_peers = node.host, node.allocation.is_first, node.allocation.num_nodes > 1
        self.secret, self.ports = node.attempt.secret, node.spec.network.ports
        self._published_at: float | None = None

    def first_node(self, port: int) -> Address:
        """Return the address of a port of the first node."""
        channel = self._channel
        host = channel.own_address if isinstance(channel, ControlServer) else channel.first_node_address
        return Address(self._allocation.first_node, host, port)

    def publish_listing(self, version: str, port: int) -> None:
        """Announce, on the first node, the version and the port that serves its listing."""
        self._published_at = time.monotonic()
        self._publish(StagingPlan(source=self._source, version=version, listing_port=port))

    def plan(self) -> StagingPlan | None:
        """Return the first node's plan; None until this node has received it."""
        if not self.has_peers:
            return super().plan()
        self.update()
        return self._current()

    def _current(self) -> StagingPlan | None:
        return next((plan for plan in self._channel.directive.plans if plan.source == self._source), None)

    def report(self, status: CacheStatus, port: int) -> None:
        """Report the state of this node's copy, and the port that serves it."""
        others = tuple(cache for cache in self._channel.status.caches if cache.source != self._source)
        self._channel.report(caches=(*others, NodeCache(source=self._source, status=status, port=port)))

    def withdraw(self) -> None:
        """Continue without a copy on this node, so that no other node waits for its copy or its plan."""
        self.report(CacheStatus.UNAVAILABLE, 0)
        if self._current() is None:
            self._publish(StagingPlan(source=self._source, version="", listing_port=0, owners=(), done=True))

    def update(self) -> None:
        """On the first node, choose the owners once all nodes have reported, and publish whether all are done."""
        server, plan = self._channel, self._current()
        if not isinstance(server, ControlServer) or plan is None or plan.done or self._published_at is None:
            return
        statuses = server.statuses()
        busy = {node_rank for node_rank, status in statuses.items() if status.phase not in OVER}
        silent = {node_rank for node_rank in busy if server.is_silent(node_rank)}
        num_expected = self._allocation.num_nodes - (len(statuses) - len(busy)) - len(silent)
        caches = [
            (Address(self._allocation.hostnames[node_rank], server.address(node_rank), cache.port), cache.status)
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
        self._publish(replace(plan, done=complete and all(status in settled for _, status in caches)))

    def _publish(self, plan: StagingPlan) -> None:
        server = self._channel
        if isinstance(server, ControlServer) and plan != self._current():
            others = tuple(other for other in server.directive.plans if other.source != self._source)
            server.directive = replace(server.directive, plans=(*others, plan))


class NodeStaging:
    """Stages this node's data and environment."""

    def __init__(self, node: NodeAttempt, channel: ControlChannel, monitor: NodeMonitor, resources: ExitStack) -> None:
        # Until `resources` is closed, at the end of the attempt, the copies cannot be deleted.
        self.node, self.channel, self.monitor, self._resources = node, channel, monitor, resources

    def stage_data(self) -> Path | None:
        """Stage the run's data on this node's disk, and return the path; None if the run reads no data.

        Raises:
            StagingStopped: the agent was asked to stop, or the attempt is over.
            BadNodeError: the source's mount on this node hangs.
            TorchrelayError: the data can be read neither from the disk nor in place.
        """
        if self.node.spec.data is None:
            return None
        source = Path(self.node.spec.data)
        staged = self.stage(source)
        if staged.in_place:
            log(f"reading {source} in place: {staged.in_place}")
        return staged.path

    def stage(self, source: Path) -> Staged:
        """Stage one source, and record the result. Raises the same errors as `stage_data`."""
        node, group = self.node, NodeGroup(self.node, self.channel, source)
        if group.is_first:
            self.monitor.callbacks.append(group.update)
        try:
            stager = Stager(
                node.stage_dir,
                group=group,
                watch=self.watch(source),
                keep_seconds=node.spec.stage_keep.seconds,
                timeout_seconds=node.spec.stage_timeout.seconds,
            )
            self._resources.enter_context(stager)
            self.monitor.callbacks.append(stager.check)
            staged = stager.stage(source)
        except (TorchrelayError, OSError):
            group.withdraw()
            raise
        fields = {**asdict(staged), "path": str(staged.path), "seconds": round(staged.seconds, 3)}
        node.record(DataStaged(node=node.host, source=str(source), **fields))
        if staged.fallback:
            log(f"read from shared storage instead of other nodes: {staged.fallback}")
        return staged

    def watch(self, source: Path) -> Watch:
        """Return a callback that polls the monitor during a copy, records the progress, and returns whether to stop."""
        began, activity, next_event = 0.0, "", 0.0

        def poll(progress: CopyProgress | None) -> bool:
            nonlocal began, activity, next_event
            self.monitor.poll()
            if progress is not None and progress.activity != activity:
                began, activity = time.monotonic(), progress.activity
                next_event = began + _FIRST_SECONDS
            if progress is not None and time.monotonic() > next_event:
                next_event = time.monotonic() + _NEXT_SECONDS
                done, total = progress.bytes_done, progress.bytes_total
                rate = done / (time.monotonic() - began)
                event = Staging(
                    node=self.node.host, source=str(source), activity=progress.activity,
                    bytes_done=done, bytes_total=total, bytes_per_second=round(rate),
                    eta_seconds=(total - done) / rate if total is not None and rate else None,
                )  # fmt: skip
                self.node.record(event)
            return self.monitor.must_leave

        return poll
