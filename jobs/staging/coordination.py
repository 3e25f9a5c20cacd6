"""The nodes of one attempt while they stage: they tell the head node's agent what they have, it says who reads what.

Runs on compute nodes. What is told travels with the agents' reports and orders.
"""

import time
from dataclasses import replace

from hpc.staging.coordination import CacheStatus, NodeCache, StagingPlan, choose_owners
from jobs.context import AgentContext
from jobs.control.channel import LOST_SECONDS, ControlServer
from jobs.control.messages import OVER

# Nodes whose agents start later than this after the first ones get their data from those.
_GATHER_SECONDS = 10.0


class NodeGroup:
    """One node's view of the others, for one data set."""

    def __init__(self, node: AgentContext, source: str) -> None:
        self._node, self._source = node, source
        self._offered_at: float | None = None

    @property
    def is_head(self) -> bool:
        """Whether this is the head node."""
        return self._node.place.is_head

    @property
    def has_peers(self) -> bool:
        """Whether the job has more than one node."""
        return self._node.place.num_nodes > 1

    @property
    def host(self) -> str:
        """This node's name."""
        return self._node.place.host

    @property
    def nonce(self) -> str:
        """The attempt's."""
        return self._node.attempt.nonce

    def publish_listing(self, version: str, port: int) -> None:
        """The head node has listed the files."""
        self._offered_at = time.monotonic()
        self._publish(StagingPlan(source=self._source, version=version, lister=(self.host, port)))

    def plan(self) -> StagingPlan | None:
        """What the head node says."""
        self.update()
        return self._said()

    def _said(self) -> StagingPlan | None:
        return next((plan for plan in self._node.orders.plans if plan.source == self._source), None)

    def report(self, status: CacheStatus, port: int) -> None:
        """Tell what this node needs."""
        others = tuple(told for told in self._node.report.standings if told.source != self._source)
        self._node.tell(standings=(*others, NodeCache(source=self._source, status=status, port=port)))

    def decline(self) -> None:
        """This node will have no copy, and goes on: the others need not wait for it, or for its word."""
        self.report(CacheStatus.UNAVAILABLE, 0)
        if self._said() is None:
            self._publish(StagingPlan(source=self._source, version="", lister=(self.host, 0), owners=(), done=True))

    def update(self) -> None:
        """On the head node: decide who reads what, once all have told what they have, and see when all are done."""
        hub, plan = self._node.link, self._said()
        if not isinstance(hub, ControlServer) or plan is None or plan.done or self._offered_at is None:
            return
        reports = {rank: report for rank, report in hub.reports().items() if report.phase not in OVER}
        silent = {rank for rank in reports if (hub.silent_seconds(rank) or 0.0) > LOST_SECONDS}
        expected = self._node.place.num_nodes - len(hub.reports().keys() - reports.keys()) - len(silent)
        told = [
            (self._node.place.hostnames[rank], standing)
            for rank, report in sorted(reports.items())
            for standing in report.standings
            if standing.source == self._source and rank not in silent
        ]
        all_told = len(told) >= expected
        late = time.monotonic() - self._offered_at > _GATHER_SECONDS
        if plan.owners is None and (all_told or late):
            plan = replace(plan, owners=choose_owners(told))
        # A node that has never said a word is not waited for for ever.
        done = (all_told or late) and all(
            standing.status in {CacheStatus.COMPLETE, CacheStatus.UNAVAILABLE} for _, standing in told
        )
        self._publish(replace(plan, done=done))

    def _publish(self, plan: StagingPlan) -> None:
        hub = self._node.link
        if isinstance(hub, ControlServer) and plan != self._said():
            others = tuple(known for known in hub.orders.plans if known.source != self._source)
            hub.orders = replace(hub.orders, plans=(*others, plan))
