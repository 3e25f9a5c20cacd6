"""What a run's events tell its user to change, as one sentence each. Pure; runs on the login node."""

from collections.abc import Sequence
from math import ceil

from hpc.core.ledger import Event
from hpc.core.outcome import Cause
from hpc.core.units import REQUEUE_SECONDS, save_timeout_seconds

# Of the time that there is to save. The rest is for storage that is slower on another day.
_MOST_SHARE = 0.8


def warnings_of(events: Sequence[Event]) -> list[str]:
    """What to change, and how; nothing if all is well."""
    last = {event["event"]: event for event in events}
    attempt = last.get("claimed", {}).get("attempt")
    now = [say(last[kind]) for kind, say in _SAYS.items() if kind in last and last[kind]["attempt"] == attempt]
    staged = [event for event in events if event["event"] == "staged" and event["attempt"] == attempt]
    told = list(filter(None, map(_not_as_wished, staged)))
    return [*_too_little_time(last.get("submitted", {}), save_seconds(events)), *told[:1], *filter(None, now)]


def save_seconds(events: Sequence[Event]) -> float | None:
    """The longest that a save took: from the signal to stop, or of a checkpoint; None before the first."""
    stops = [event["seconds"] for event in events if event["event"] == "train_stopped" and "seconds" in event]
    saves = [event["seconds"] + event["copy_seconds"] for event in events if event["event"] == "checkpoint_saved"]
    return max([*stops, *saves], default=None)


def _too_little_time(submitted: Event, took: float | None) -> list[str]:
    found = list[str]()
    lead, grace = submitted.get("stop_lead_seconds"), submitted.get("grace_seconds")
    if took is not None and lead is not None and took > _MOST_SHARE * (lead - REQUEUE_SECONDS):
        found.append(
            f"saving took {took:.1f} s, and the run is told to {lead} s before the time limit, the last "
            f"{REQUEUE_SECONDS:.0f} s of which are for the requeue: submit with --stop-lead {ceil(2 * took / 60)}m"
        )
    if took is not None and grace is not None and took > _MOST_SHARE * save_timeout_seconds(grace):
        enough = ceil(took / _MOST_SHARE + REQUEUE_SECONDS)
        found.append(
            f"saving took {took:.1f} s, and on preemption Slurm ends the run after {grace} s: use a shorter "
            f"--checkpoint-every, so that less is lost, or ask the administrators for GraceTime={enough}"
        )
    return found


def _slow_rank(event: Event) -> str:
    return (
        f"rank {event['rank']} on {event['node']} needs {event['busy_seconds']:.3g} s for its part of a step, the "
        f"others {event['median_seconds']:.3g} s, and all wait for it: look at that node, or --exclude {event['node']}"
    )


def _no_snapshots(event: Event) -> str:
    return f"no snapshots are taken: {event['reason']}"


def _not_as_wished(event: Event) -> str | None:
    if event.get("in_place"):
        return (
            f"{event['node']} reads {event['source']} in place, all the time: {event['in_place']}; use --stage-dir "
            "with a larger disk of the nodes, or hpc stage --clean there"
        )
    if event.get("in_memory"):
        return f"the copy of {event['source']} on {event['node']} is in memory: ask for so much more with --mem"
    return None


_AFTER = {
    Cause.NO_SPACE: "there was no space left: make room, then `sbatch submit.sbatch` in its directory goes on",
    Cause.DIVERGED: "another attempt would end alike: look at the images in diverged.json, and submit it under a new "
    "name with a smaller --lr, more --warmup-epochs or --clip-grad-norm 1",
    Cause.BAD_INPUT: "another attempt would end alike: mend what it says, and submit it under a new name",
}


def _what_to_do(ended: Event) -> str | None:
    return _AFTER.get(ended["cause"])


_SAYS = {"slow_rank": _slow_rank, "snapshot_off": _no_snapshots, "attempt_ended": _what_to_do}
