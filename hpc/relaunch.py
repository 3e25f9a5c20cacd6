"""From one job of a run to its next: the end of an attempt, which exactly one process writes down, and a new job.

Runs on compute nodes, in agents that outlive their head node, and on the login node, in the supervisor.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc import ledger, slurm
from hpc.files import json_line, last_json_line, look_again, write_exclusive
from hpc.ledger import Event
from hpc.outcome import Cause
from hpc.rundir import RunDir
from hpc.spec import RunSpec

# A node that failed is rebooted or mended some time.
_BLAME_SECONDS = 6 * 3600.0


def end(run: RunDir, attempt: int, **fields: object) -> bool:
    """Write down that an attempt has ended; False if somebody else has done so already, whose word counts.

    An agent that still works on the attempt leaves it within seconds.

    Raises:
        OSError: it could not be written.
    """
    event = ledger.record("attempt_ended", attempt=attempt, **fields)
    return write_exclusive(_end_file(run, attempt), json_line(event))


def has_ended(run: RunDir, attempt: int) -> bool:
    """Whether somebody has written down that an attempt is over."""
    look_again(run.events)
    return _end_file(run, attempt).exists()


def _end_file(run: RunDir, attempt: int) -> Path:
    return run.events / f"attempt-{attempt:03d}-end.jsonl"


def last_step(run: RunDir) -> int | None:
    """The last step in the metrics; None before the first, and for a script, which has none."""
    record = last_json_line(run.train_metrics)
    return None if record is None else record.get("step")


def exclusions(spec: RunSpec, events: Iterable[Event], failed: Sequence[str] = ()) -> list[str]:
    """What the next job of a run keeps away from: the user's --exclude, and nodes that failed the run of late.

    Of those as many as its partition can do without.

    Args:
        spec: what the run was submitted as.
        events: what happened to it.
        failed: nodes that have failed just now.
    """
    given = [spec.resources.exclude] if spec.resources.exclude else []
    names = list(dict.fromkeys([*failed, *blamed(events, time.time())]))
    if not names:
        return given
    # Slurm itself keeps away from those that it knows to be down.
    usable = slurm.usable_nodes(spec.resources.partition)
    spare = max(0, len(usable) - spec.job_nodes[0])
    if len(usable.intersection(failed)) > spare:
        return given  # some of them have to do, and nobody knows which of them lives
    return [*given, *[name for name in names if name in usable][:spare]]


def blamed(events: Iterable[Event], now: float) -> list[str]:
    """The nodes that failed a run within the last hours, the last one first. Pure."""
    recent = [event for event in events if now - event["time"] < _BLAME_SECONDS and event.get("node")]
    guilty = [event["node"] for event in recent if _is_blame(event)]
    return list(dict.fromkeys(reversed(guilty)))


def _is_blame(event: Event) -> bool:
    return event["event"] == "node_lost" or event.get("cause") in {Cause.BAD_NODE, Cause.LOST}
