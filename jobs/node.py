"""What one agent works with during one attempt. Runs on compute nodes."""

from dataclasses import dataclass

from hpc import ledger
from hpc.attempts import Attempt
from hpc.ledger import Writer
from hpc.rundir import RunDir
from hpc.spec import RunSpec
from jobs.rendezvous import Place
from jobs.torchrun import StopRequest


@dataclass(frozen=True, kw_only=True)
class Node:
    """What one agent works with during one attempt."""

    run: RunDir
    spec: RunSpec
    place: Place
    stop: StopRequest
    attempt: Attempt
    writer: Writer

    def note(self, event: str, **fields: object) -> None:
        """Write an event of this attempt; what follows is worth more than its record, should the disk be full."""
        try:
            self.writer.append(event, attempt=self.attempt.attempt, **fields)
        except OSError as error:
            print(f"torchrelay: {event} could not be recorded: {error}", flush=True)

    def newest_round(self) -> int:
        """The rendezvous that the head node's agent has announced last; 0 before the first."""
        rounds = [event["round"] for event in self.events("rendezvous")]
        return max(rounds, default=0)

    def events(self, kind: str) -> list[ledger.Event]:
        """This attempt's events of one kind, of all nodes."""
        events = ledger.read(self.run.events)
        return [event for event in events if event["event"] == kind and event.get("attempt") == self.attempt.attempt]
