"""What the runs of a user know about bad nodes, so that one run's failure spares the others. Runs everywhere.

Each failure is a file in the runs directory, beside the runs. A file is written whole, and ignored when it is old.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc.base.files import write_atomic
from hpc.run.causes import Cause
from hpc.run.events.kinds import AttemptEnded, Event, Interrupted, NodeFailed, NodeReturned
from hpc.run.rundir import RunDir

# Slurm itself marks a dead node down within SlurmdTimeout, usually 300 s. A bad node has probably been repaired after
# some hours.
_SECONDS = {Cause.NODE_FAILURE: 900.0, Cause.BAD_NODE: 6 * 3600.0}


@dataclass(frozen=True, kw_only=True)
class BadNode:
    """A node that has failed a run."""

    node: str
    run: str
    cause: Cause
    time: float
    """Seconds since the epoch."""

    def __str__(self) -> str:
        minutes = max(0, time.time() - self.time) / 60
        return f"{self.node} ({self.cause} in run {self.run}, {minutes:.0f} min ago)"


def _prefix() -> str:
    return f".bad-node.{os.getuid()}."  # several users may share a runs directory


def learn(run: RunDir, event: Event) -> None:
    """Record that a node has failed a run on Slurm, or works again, if an event says so.

    Raises:
        OSError: the runs directory cannot be changed.
    """
    if isinstance(event, NodeReturned):
        for path in run.path.parent.glob(f"{_prefix()}{event.node}.*.json"):
            path.unlink(missing_ok=True)
    elif isinstance(event, NodeFailed | Interrupted | AttemptEnded) and event.node and event.cause in _SECONDS:
        bad = BadNode(node=event.node, run=run.name, cause=Cause(event.cause), time=time.time())
        write_atomic(run.path.parent / f"{_prefix()}{event.node}.{run.name}.json", json.dumps(asdict(bad)) + "\n")


def known(runs_dir: Path) -> Sequence[BadNode]:
    """Return the nodes that have recently failed this user's runs in a directory, the newest failure first.

    A run that has found several bad nodes is probably to blame itself: its --setup or Python fails on each node.
    """
    found, now = list[BadNode](), time.time()
    for path in runs_dir.glob(f"{_prefix()}*.json"):
        try:
            fields = json.loads(path.read_text())
            bad = BadNode(**{**fields, "cause": Cause(fields["cause"])})
        except (OSError, ValueError, TypeError, KeyError):
            continue  # another process is removing the file, or somebody has changed it
        if now - bad.time < _SECONDS[bad.cause]:
            found.append(bad)
    times = Counter(bad.run for bad in found if bad.cause is Cause.BAD_NODE)
    found = [bad for bad in found if bad.cause is Cause.NODE_FAILURE or times[bad.run] == 1]
    newest = {bad.node: bad for bad in sorted(found, key=lambda bad: bad.time)}
    return sorted(newest.values(), key=lambda bad: -bad.time)
