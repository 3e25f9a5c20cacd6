"""Warnings: what the user should change, from a run's events. Pure; runs on the login node."""

from collections.abc import Sequence
from math import ceil

from hpc.core.ledger import Event
from hpc.core.outcome import Cause
from hpc.core.units import REQUEUE_SECONDS, save_timeout_seconds

# A save should take at most this share of the time before the job ends: storage may be slower on another day.
_MOST_SHARE = 0.8


def warnings_of(events: Sequence[Event]) -> list[str]:
    """One sentence per warning, with the flag to type."""
    last = {event["event"]: event for event in events}
    attempt = last.get("claimed", {}).get("attempt")
    now = [
        warning(last[kind]) for kind, warning in _WARNINGS.items() if kind in last and last[kind]["attempt"] == attempt
    ]
    staged = [event for event in events if event["event"] == "staged" and event["attempt"] == attempt]
    staging = list(filter(None, map(_staging_warning, staged)))
    return [*_too_little_time(last.get("submitted", {}), save_seconds(events)), *staging[:1], *filter(None, now)]


def save_seconds(events: Sequence[Event]) -> float | None:
    """The longest time of a save: from the stop signal, or of a checkpoint; None before the first."""
    stops = [event["seconds"] for event in events if event["event"] == "train_stopped" and "seconds" in event]
    saves = [event["seconds"] + event["copy_seconds"] for event in events if event["event"] == "checkpoint_saved"]
    return max([*stops, *saves], default=None)


def _too_little_time(submitted: Event, took: float | None) -> list[str]:
    found = list[str]()
    lead, grace = submitted.get("stop_lead_seconds"), submitted.get("grace_seconds")
    if took is not None and lead is not None and took > _MOST_SHARE * (lead - REQUEUE_SECONDS):
        found.append(
            f"saving took {took:.1f} s; the stop signal comes {lead} s before the time limit, and the requeue needs "
            f"the last {REQUEUE_SECONDS:.0f} s: submit with --stop-lead {ceil(2 * took / 60)}m"
        )
    if took is not None and grace is not None and took > _MOST_SHARE * save_timeout_seconds(grace):
        enough = ceil(took / _MOST_SHARE + REQUEUE_SECONDS)
        found.append(
            f"saving took {took:.1f} s; on preemption Slurm kills the run after {grace} s: lose less with a shorter "
            f"--checkpoint-every, or ask the administrators for GraceTime={enough}"
        )
    return found


def _slow_rank(event: Event) -> str:
    return (
        f"rank {event['rank']} on {event['node']} needs {event['busy_seconds']:.3g} s per step, the others "
        f"{event['median_seconds']:.3g} s, and all wait for it: check that node, or --exclude {event['node']}"
    )


def _no_snapshots(event: Event) -> str:
    return f"snapshots are off: {event['reason']}"


def _staging_warning(event: Event) -> str | None:
    if event.get("in_place"):
        return (
            f"{event['node']} reads {event['source']} in place, without a copy: {event['in_place']}; set "
            "--stage-dir to a larger disk of the nodes, or run hpc stage --clean there"
        )
    if event.get("in_memory"):
        return f"the copy of {event['source']} on {event['node']} is RAM-backed: add the size of the data set to --mem"
    return None


_ADVICE = {
    Cause.NO_SPACE: "no space left: make room, then continue with `sbatch submit.sbatch` in the run directory",
    Cause.DIVERGED: "another attempt would diverge again: check the images in diverged.json, and submit under a new "
    "name with a smaller --lr, more --warmup-epochs or --clip-grad-norm 1",
    Cause.BAD_INPUT: "another attempt would fail again: correct the input, and submit under a new name",
}


def _advice(ended: Event) -> str | None:
    return _ADVICE.get(ended["cause"])


_WARNINGS = {"slow_rank": _slow_rank, "snapshot_off": _no_snapshots, "attempt_ended": _advice}
