"""From one job of a run to its next: the end of an attempt, which exactly one process writes down, and a new job.

Runs on compute nodes, in agents that outlive their head node, and on the login node, in the supervisor.
"""

import json
import os
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from hpc.core import ledger
from hpc.core.errors import TorchrelayError
from hpc.core.files import json_line, last_json_line, refresh_nfs_cache, write_exclusive
from hpc.core.kernel import start_time
from hpc.core.ledger import Event
from hpc.core.outcome import Cause, JobState
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from hpc.slurm.squeue import jobs_by_script
from hpc.spec import RunSpec

# A node that failed is rebooted or mended some time.
_BLAME_SECONDS = 6 * 3600.0


def record_end(run: RunDir, attempt: int, **fields: object) -> bool:
    """Write down that an attempt has ended; False if somebody else has done so already, whose word counts.

    An agent that still works on the attempt leaves it within seconds.

    Raises:
        OSError: it could not be written.
    """
    event = ledger.record("attempt_ended", attempt=attempt, **fields)
    return write_exclusive(_end_file(run, attempt), json_line(event))


def has_ended(run: RunDir, attempt: int) -> bool:
    """Whether somebody has written down that an attempt is over."""
    refresh_nfs_cache(run.events)
    return _end_file(run, attempt).exists()


def _end_file(run: RunDir, attempt: int) -> Path:
    return run.events / f"attempt-{attempt:03d}-end.jsonl"


def last_step(run: RunDir) -> int | None:
    """The last step in the metrics; None before the first, and for a script, which has none."""
    record = last_json_line(run.train_metrics)
    return None if record is None else record.get("step")


def claim_next_job(run: RunDir, attempt: int, seen: Iterable[Event]) -> bool:
    """Be the one that submits the next job; False if another agent or supervisor is.

    Args:
        run: the run.
        attempt: its last one.
        seen: the events on which it was decided. Of those who have seen the same, one creates the file.
    """
    number = sum(event["event"] == "relaunching" for event in seen) + 1
    pid = os.getpid()
    event = ledger.record("relaunching", attempt=attempt, host=socket.gethostname(), pid=pid, started=start_time(pid))
    return write_exclusive(run.events / f"next-{number:03d}.jsonl", json_line(event))


def submit_next_job(run: RunDir, spec: RunSpec, excluded: Sequence[str], old: Collection[str]) -> str:
    """The run's next job: a new one, unless one waits already. An answer of sbatch may have been lost.

    Args:
        run: the run.
        spec: what it was submitted as.
        excluded: nodes to keep away from, from `exclusions`.
        old: its jobs so far.

    Raises:
        TorchrelayError: it was refused.
    """
    for job in jobs_by_script(slurm.jobs().values()).get(os.path.realpath(run.script), []):
        if job.state is JobState.PENDING and job.job_id not in old:
            return job.job_id
    environment = json.loads(run.environment.read_text()) if run.environment.exists() else None
    try:
        return slurm.submit(run.script, excluded, environment)
    except TorchrelayError as error:
        given = _given(spec)
        # A constraint, or the kind of GPU, can make a partition smaller than it looks.
        if excluded == given or "not available" not in str(error):
            raise
        return slurm.submit(run.script, given, environment)


def _given(spec: RunSpec) -> list[str]:
    return [spec.resources.exclude] if spec.resources.exclude else []


def nodes_to_exclude(spec: RunSpec, events: Iterable[Event], failed: Sequence[str] = ()) -> list[str]:
    """What the next job of a run keeps away from: the user's --exclude, and nodes that failed the run of late.

    Of those as many as its partition can do without.

    Args:
        spec: what the run was submitted as.
        events: what happened to it.
        failed: nodes that have failed just now.
    """
    given = _given(spec)
    names = list(dict.fromkeys([*failed, *recently_failed_nodes(events, time.time())]))
    if not names:
        return given
    # Slurm itself keeps away from those that it knows to be down.
    usable = slurm.usable_nodes(spec.resources.partition)
    usable -= {name for nodes in given for name in slurm.hostnames(nodes)}
    spare = max(0, len(usable) - spec.job_nodes[0])
    if len(usable.intersection(failed)) > spare:
        return given  # some of them have to do, and nobody knows which of them lives
    return [*given, *[name for name in names if name in usable][:spare]]


def recently_failed_nodes(events: Iterable[Event], now: float) -> list[str]:
    """The nodes that failed a run within the last hours, the last one first. Pure."""
    recent = [event for event in events if now - event["time"] < _BLAME_SECONDS and event.get("node")]
    guilty = [event["node"] for event in recent if _is_blame(event)]
    return list(dict.fromkeys(reversed(guilty)))


def _is_blame(event: Event) -> bool:
    return event["event"] == "node_lost" or event.get("cause") in {Cause.BAD_NODE, Cause.LOST, Cause.NODE_FAILURE}
