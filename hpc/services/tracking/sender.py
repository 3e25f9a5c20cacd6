"""Sends the metrics of a run to a tracker while it trains. Runs on compute nodes: a process for each tracker.

The first node's agent starts `python -m hpc.services.tracking.sender RUN_DIR SERVICE ATTEMPT`, which can neither stop
nor delay the training. The process ends when its standard input ends: at the end of the attempt, or when the agent
dies. If it cannot send, as on nodes without internet, `hpc sync` sends the missing points from the login node.
"""

import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from hpc.base.errors import TorchrelayError
from hpc.run.events.history import History
from hpc.run.events.kinds import OfTracker, Tracking, TrackingFailed
from hpc.run.events.ledger import EventWriter, attempt_prefix
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, Service
from hpc.services.tracking.opening import tracker_of
from hpc.services.tracking.tracker import TITLES, Tracker, read_points

_POLL_SECONDS = 15.0
_RETRY_SECONDS = 300.0


def send_new(run: RunDir, tracker: Tracker) -> int:
    """Send the points that the tracker lacks, and return their number. Raises TrackingError."""
    points = read_points(run.train_metrics.parent, tracker.sent)
    tracker.send(points)
    return len(points)


def last_events(history: History, attempt: int | None) -> dict[str, OfTracker]:
    """Return the last event about each tracker in an attempt. Pure."""
    return {event.service: event for event in history.during(attempt).of(OfTracker)}


def main(argv: Sequence[str]) -> int:
    """Send new points until the attempt is over. Return 1 if the last try to send failed."""
    run, service, attempt = RunDir(Path(argv[0])), cast("Service", argv[1]), int(argv[2])
    # A requeue signals all processes of the job. This one ignores the signals, and sends the last points meanwhile.
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    writer = EventWriter(run.events / f"{attempt_prefix(attempt)}tracking-{service}.jsonl", attempt)
    while True:
        try:
            tracker = tracker_of(service)(run, RunSpec.load(run))
            writer.append(Tracking(service=service, url=tracker.url))
            while not _input_ends_within(_POLL_SECONDS):
                send_new(run, tracker)
            send_new(run, tracker)
            tracker.close(History.load(run).outcome)
        except (OSError, TorchrelayError) as error:
            writer.append(TrackingFailed(service=service, reason=str(error)))
            print(f"torchrelay: the metrics cannot be sent to {TITLES[service]}: {error}", flush=True)
            if _input_ends_within(_RETRY_SECONDS):
                return 1
        else:
            return 0


def _input_ends_within(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
