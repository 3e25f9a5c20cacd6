"""Remembers which nodes have failed a user's runs, and says which nodes the next job excludes. Runs everywhere.

Each failure is a file in the runs directory, beside the runs. A file is written whole, and removed when it is old.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import DecodeError, Struct, json

from hpc.base.files import write_atomic
from hpc.run.causes import Cause
from hpc.run.events.kinds import AttemptEnded, Event, Interrupted, NodeFailed, NodeReturned
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import client, sinfo

# Slurm itself marks a dead node down within SlurmdTimeout, usually 300 s. A bad node has probably been repaired after
# some hours.
_SECONDS = {Cause.NODE_FAILURE: 900.0, Cause.BAD_NODE: 6 * 3600.0, Cause.LOST: 6 * 3600.0}


class BadNode(Struct, frozen=True, kw_only=True):
    """A node that has failed a run."""

    node: str
    run: str
    cause: Cause
    time: float
    """Seconds since the epoch."""

    @property
    def age_seconds(self) -> float:
        """Seconds since the failure."""
        return time.time() - self.time

    def __str__(self) -> str:
        return f"{self.node} ({self.cause} in run {self.run}, {max(0.0, self.age_seconds) / 60:.0f} min ago)"


def _path(run: RunDir, node: str) -> Path:
    return run.path.parent / f"{_prefix()}{node}.{run.name}.json"


def _prefix() -> str:
    return f".bad-node.{os.getuid()}."  # several users may share a runs directory


def learn(run: RunDir, event: Event) -> None:
    """Record that a node has failed a run on Slurm, or that the run has contact with it again, if an event says so.

    Raises:
        OSError: the runs directory cannot be changed.
    """
    if isinstance(event, NodeReturned):
        _path(run, event.node).unlink(missing_ok=True)
    elif isinstance(event, NodeFailed | Interrupted | AttemptEnded) and event.node and event.cause in _SECONDS:
        bad = BadNode(node=event.node, run=run.name, cause=Cause(event.cause), time=time.time())
        write_atomic(_path(run, event.node), json.encode(bad) + b"\n")


def known(runs_dir: Path, run: str | None = None) -> Sequence[BadNode]:
    """Return the nodes that a run of this user avoids, the newest failure first; by default, a run that has just begun.

    Of other runs, only what is no fault of theirs counts. A run that has found several bad nodes is probably the cause
    itself, because its --setup or Python fails on each.
    """
    failures = list[BadNode]()
    for path in runs_dir.glob(f"{_prefix()}*.json"):
        # Another process removes the file, the storage fails, or the file is damaged: nobody needs to know.
        with suppress(OSError, DecodeError, RecursionError):
            if path.stat().st_uid != os.getuid():
                continue
            bad = json.decode(path.read_bytes(), type=BadNode)
            if abs(bad.age_seconds) < _SECONDS.get(bad.cause, 0.0):  # a node's clock may be ahead
                failures.append(bad)
            else:
                path.unlink()
    times = Counter(bad.run for bad in failures if bad.cause is Cause.BAD_NODE)
    counts = {Cause.NODE_FAILURE: True, Cause.LOST: False}
    failures = [bad for bad in failures if bad.run == run or counts.get(bad.cause, times[bad.run] == 1)]
    newest = {bad.node: bad for bad in sorted(failures, key=lambda bad: bad.time)}
    return sorted(newest.values(), key=lambda bad: -bad.time)


def typed_exclude(spec: RunSpec) -> list[str]:
    """Return the nodes that the user excludes, as a list of Slurm's node lists."""
    return [spec.resources.exclude] if spec.resources.exclude else []


def nodes_to_exclude(run: RunDir, spec: RunSpec, failed: Sequence[str] = ()) -> list[str]:
    """Return the nodes that the next job of a run excludes: the user's --exclude, `failed`, and known bad nodes.

    Nodes that have failed are excluded only if the partition has enough other nodes for the job.
    """
    typed = typed_exclude(spec)
    names = list(dict.fromkeys([*failed, *(bad.node for bad in known(run.path.parent, run.name))]))
    if not names:
        return typed
    # Slurm does not use nodes that it has marked down.
    usable = sinfo.usable_nodes(spec.resources.partition)
    usable -= {name for nodes in typed for name in client.hostnames(nodes)}
    spare = max(0, len(usable) - spec.job_nodes.fewest)
    if len(usable.intersection(failed)) > spare:
        return typed  # the job needs some of `failed`, and nobody knows which of them work
    return [*typed, *[name for name in names if name in usable][:spare]]
