"""From one job of a run to its next: the end of an attempt, which exactly one process writes down, and a new job.

Runs on compute nodes, in agents that outlive their head node, and on the login node, in the supervisor.
"""

from collections.abc import Sequence
from pathlib import Path

from hpc import ledger, slurm
from hpc.files import json_line, look_again, write_exclusive
from hpc.rundir import RunDir
from hpc.spec import RunSpec


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


def submit(run: RunDir, spec: RunSpec, avoid: Sequence[str]) -> tuple[str, list[str]]:
    """Submit a new job for a run, away from some nodes.

    Args:
        run: the run.
        spec: what it was submitted as.
        avoid: names of nodes; the first ones matter most, if the partition cannot do without all.

    Returns:
        The job's id, and the nodes that it keeps away from.

    Raises:
        TorchrelayError: it was refused.
    """
    given = spec.resources.exclude
    excluded = spared(spec, avoid)
    return slurm.submit(run.script, [*([given] if given else []), *excluded]), excluded


def spared(spec: RunSpec, avoid: Sequence[str]) -> list[str]:
    """As many of the nodes to avoid as the partition can do without."""
    wanted = spec.resources.partition
    found = [p for p in slurm.partitions() if (p.name in wanted.split(",") if wanted else p.default)]
    most = sum(partition.nodes for partition in found) - spec.job_nodes[0]
    return list(avoid[: max(0, most)])
