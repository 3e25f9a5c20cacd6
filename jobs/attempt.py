"""One node's part in one attempt: what the attempt is, and where its events go. Runs on compute nodes."""

import contextlib
from dataclasses import dataclass, field
from threading import Event

from hpc.core import ledger
from hpc.core.attempts import Attempt
from hpc.core.ledger import EventWriter
from hpc.core.nodedir import NodeDir
from hpc.core.rundir import RunDir
from hpc.spec import RunSpec
from jobs.allocation import NodeAllocation


@dataclass(frozen=True, kw_only=True)
class NodeAttempt:
    """The facts of one attempt on one node."""

    run: RunDir
    spec: RunSpec
    allocation: NodeAllocation
    attempt: Attempt
    node_dir: NodeDir
    """The run's files in this node's memory."""
    writer: EventWriter
    has_unsaved_snapshot: Event = field(default_factory=Event)
    """Set if the newest snapshot could not be saved, and is in this node's memory alone."""

    @property
    def host(self) -> str:
        """This node's host name."""
        return self.allocation.host

    @property
    def on_slurm(self) -> bool:
        """Whether Slurm runs the job; submitit's local executor otherwise."""
        return self.allocation.cluster == "slurm"

    def record_event(self, event: str, **fields: object) -> None:
        """Append an event of this attempt. A full disk does not interrupt the run: the event is printed instead."""
        try:
            self.writer.append(event, attempt=self.attempt.attempt, **fields)
        except OSError as error:
            log(f"{event} could not be recorded: {error}")

    def run_events(self) -> list[ledger.Event]:
        """All events of the run, of all attempts and nodes."""
        return ledger.read(self.run.events)

    def events(self, kind: str) -> list[ledger.Event]:
        """Events of one kind in this attempt, of all nodes."""
        number = self.attempt.attempt
        return [event for event in self.run_events() if event["event"] == kind and event.get("attempt") == number]


def log(text: str) -> None:
    """Print a line to the job's log. A full disk does not interrupt the run."""
    with contextlib.suppress(OSError):
        print(f"torchrelay: {text}", flush=True)
