"""What one agent works with during one attempt. Runs on compute nodes."""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpc.core import ledger
from hpc.core.attempts import Attempt
from hpc.core.ledger import EventWriter
from hpc.core.nodedir import NodeDir
from hpc.core.rundir import RunDir
from hpc.core.units import KILL_WAIT_SECONDS, REQUEUE_SECONDS, save_timeout_seconds
from hpc.spec import RunSpec
from jobs.control.channel import LOST_SECONDS, ControlClient, ControlServer
from jobs.control.messages import Directive, NodeStatus
from jobs.log import log
from jobs.ranks.local_ranks import LocalRanks
from jobs.ranks.rendezvous import NodeAllocation
from jobs.ranks.torchrun import StopRequest

_TURN_SECONDS, _AGAIN_SECONDS = 0.2, 2.0


@dataclass(kw_only=True)
class AgentContext:
    """What one agent works with during one attempt."""

    run: RunDir
    spec: RunSpec
    place: NodeAllocation
    stop: StopRequest
    attempt: Attempt
    writer: EventWriter
    memory: NodeDir
    ranks: LocalRanks
    link: ControlServer | ControlClient
    report: NodeStatus
    duties: list[Callable[[], None]] = field(default_factory=list)
    """What the head node's agent does at every turn."""
    held: ExitStack = field(default_factory=ExitStack)
    """What is given back when the attempt is over."""
    python: str = sys.executable
    """What torchrun and its ranks are started with: this process's own, or that of a copy on this node's disk."""
    unsaved: bool = False
    """Whether the newest snapshot is in this node's memory alone."""
    last_step: int = 0
    """The last step that a rank of this node has done in this attempt."""
    _turned: float = 0.0

    @property
    def orders(self) -> Directive:
        """What the head node's agent wants."""
        return self.link.orders

    @property
    def head_is_lost(self) -> bool:
        """Whether the head node's agent has been silent for too long."""
        return isinstance(self.link, ControlClient) and self.link.has_met and self.link.silent_seconds > LOST_SECONDS

    @property
    def patience_seconds(self) -> float:
        """How long ranks that were asked to stop may take: SIGTERM leaves less time than the limit's warning."""
        if self.stop.signal is not signal.SIGTERM:
            return self.spec.stop_lead_seconds - REQUEUE_SECONDS
        told = [event.get("grace_seconds") for event in self.events("submitted", of_attempt=False)]
        return save_timeout_seconds(next(filter(None, reversed(told)), KILL_WAIT_SECONDS))

    @property
    def clock_skew(self) -> float:
        """Seconds to add to this node's times, so that they compare with the head's."""
        return (self.link.skew_seconds or 0.0) if isinstance(self.link, ControlClient) else 0.0

    @property
    def head_heard(self) -> float:
        """When the head node's agent was last heard of, in seconds since the epoch."""
        return time.time() - (self.link.silent_seconds if isinstance(self.link, ControlClient) else 0.0)

    def tell(self, **changes: Any) -> None:
        """NodeStatus something new."""
        self.report = replace(self.report, **changes)
        self.link.tell(self.report)

    def turn(self) -> None:
        """Look after the ranks and report, a few times a second; called from every loop that waits."""
        if time.monotonic() - self._turned < _TURN_SECONDS:
            return
        self._turned = time.monotonic()
        for failure in self.ranks.new_failures(self.clock_skew):
            self.note("rank_failed", **asdict(failure))
        beats = self.ranks.beats()
        self.last_step = max([self.last_step, *(beat.step for beat in beats)])
        stopped = self.stop.signal and self.stop.signal.name
        self.tell(beats=beats, failures=self.ranks.failures, signal=stopped)
        try:
            for duty in self.duties:
                duty()
        except OSError as error:
            # Shared storage that does not answer for a while (ESTALE, EIO) is no reason to die of: the ranks may not
            # need it.
            log(f"{error}: trying again")
            self._turned += _AGAIN_SECONDS

    def note(self, event: str, **fields: object) -> None:
        """Write an event of this attempt; what follows is worth more than its record, should the disk be full."""
        try:
            self.writer.append(event, attempt=self.attempt.attempt, **fields)
        except OSError as error:
            log(f"{event} could not be recorded: {error}")

    def events(self, kind: str, *, of_attempt: bool = True) -> list[ledger.Event]:
        """Events of one kind, of all nodes; by default this attempt's alone."""
        found = [event for event in ledger.read(self.run.events) if event["event"] == kind]
        return [event for event in found if not of_attempt or event.get("attempt") == self.attempt.attempt]
