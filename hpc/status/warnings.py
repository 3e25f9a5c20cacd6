"""Warnings with advice to the user, from a run's events. Pure; runs on the login node."""

from math import ceil

from hpc.base.text import rank_names
from hpc.run.causes import Cause
from hpc.run.events.history import History
from hpc.run.events.kinds import (
    AttemptEnded,
    Claimed,
    DataStaged,
    Interrupted,
    RanksEnded,
    RanksSilent,
    RanksStarted,
    Refused,
    Resumed,
    RoundStarted,
    SlowRank,
    SnapshotOff,
    Submitted,
)  # fmt: skip
from hpc.run.stop_times import REQUEUE_SECONDS, save_timeout_seconds
from hpc.services.notification.notices import unsent_messages

# A save should take at most this share of the time until the job ends: storage may be slower on another day.
MAX_SHARE = 0.8
_ADVICE: dict[str, str] = {
    Cause.NO_SPACE: "no space left: free some space, then continue with hpc resume",
    Cause.DIVERGED: "another attempt would diverge again: check the images in diverged.json, then continue "
    "from its newest checkpoint with hpc fork and a smaller --lr or --clip-grad-norm 1",
    Cause.BAD_INPUT: "another attempt would fail again: correct the input, then continue with hpc resume "
    "(with --new-code if you have changed the code), or submit under a new name",
}


def warnings_of(history: History, *, completed: bool = False) -> list[str]:
    """Return one sentence per warning, with the flag to type.

    A completed run gets warnings only about its messages. Most other warnings are about the last
    attempt; two are about the whole run: too little time to save, and a job that refused to start the run.
    """
    claimed = history.last(Claimed)
    if completed:
        return _unsent(history)
    now = history.during(claimed.attempt) if claimed else History()
    found = _refused_job(history)
    found += _too_little_time(history.last(Resumed) or history.last(Submitted), history.save_seconds)
    found += list(filter(None, map(_staging_warning, now.of(DataStaged))))[:1]
    if slow := now.last(SlowRank):
        found.append(
            f"rank {slow.rank} on {slow.node} needs {slow.busy_seconds:.3g} s per step, the others "
            f"{slow.median_seconds:.3g} s, and all wait for it: check that node, or --exclude {slow.node}"
        )
    found += _ranks_that_ended_early(now)
    if (silent := now.last(RanksSilent)) and silent.seconds and now.last(AttemptEnded) is None:
        found.append(
            f"no rank has used the processor, or read or written anything, for {silent.seconds / 60:.0f} minutes or "
            "more: if the script hangs, type hpc cancel, then hpc resume --hang-timeout 20m, which restarts such ranks"
        )
    if off := now.last(SnapshotOff):
        found.append(f"snapshots are off: {off.reason}")
    if (ended := now.last(AttemptEnded)) and ended.cause in _ADVICE and now.last(Resumed) is None:
        found.append(_ADVICE[ended.cause])
    return [*found, *_unsent(history)]


def unknown_restarts(history: History, interruptions: int) -> list[str]:
    """Return a warning if the step from which a user's script resumed is unknown."""
    if not interruptions or history.knows_steps:
        return []
    after = "the interruption" if interruptions == 1 else f"each of the {interruptions} interruptions"
    unknown = f"the step from which the script resumed after {after} is unknown"
    restarted = "unless it restores its own checkpoints, it restarted from the beginning (docs/how-to/own-script.md)"
    return [f"{unknown}: {restarted}"]


def _unsent(history: History) -> list[str]:
    """Return a warning for each recipient that did not get its newest message."""
    failed = {one["recipient"]: one for one in unsent_messages(history) if one["problem"]}
    return [
        f"{name} did not get the message {one['notice']} ({one['problem']}): try it with hpc notify {name}"
        for name, one in failed.items()
    ]


def _refused_job(history: History) -> list[str]:
    """Return a warning if the newest job refused to start the run, for example because the run was cancelled."""
    starts = [event for event in history.events if isinstance(event, Refused | Claimed | Resumed)][-1:]
    return [f"job {event.job_id}: {event.detail}" for event in starts if isinstance(event, Refused) and not event.waits]


def _ranks_that_ended_early(attempt: History) -> list[str]:
    """Return a warning if ranks have ended and the others still run."""
    kinds = RoundStarted | RanksStarted | RanksEnded | Interrupted | AttemptEnded
    last = [event for event in attempt.events if isinstance(event, kinds)][-1:]
    return [
        f"{rank_names(event.ranks)} ended with exit code 0 while the other ranks run: if these wait for it in a "
        "collective, they fail after torch's timeout (by default 10 minutes with NCCL, 30 with gloo)"
        for event in last
        if isinstance(event, RanksEnded)
    ]


def _too_little_time(submitted: Submitted | Resumed | None, took: float | None) -> list[str]:
    found = list[str]()
    if submitted is None:
        return found
    lead, grace = submitted.stop_lead_seconds, submitted.grace_seconds
    if took is not None and lead is not None and took > MAX_SHARE * (lead - REQUEUE_SECONDS):
        found.append(
            f"saving took {took:.1f} s; the stop signal comes {lead:g} s before the time limit, and the requeue needs "
            f"the last {REQUEUE_SECONDS:.0f} s: submit with --signal-before {ceil(2 * took / 60)}m"
        )
    if took is not None and grace is not None and took > MAX_SHARE * save_timeout_seconds(grace):
        enough = ceil(took / MAX_SHARE + REQUEUE_SECONDS)
        found.append(
            f"saving took {took:.1f} s; on preemption Slurm kills the run after {grace:g} s: use a shorter "
            f"--checkpoint-every, which reduces the loss, or ask the administrators for GraceTime={enough}"
        )
    return found


def _staging_warning(event: DataStaged) -> str | None:
    if event.in_place:
        return (
            f"{event.node} reads {event.source} in place, without a copy: {event.in_place}; set "
            "--stage-dir to a larger disk of the nodes"
        )
    if event.in_memory:
        return f"the copy of {event.source} on {event.node} is RAM-backed: add the size of the data set to --mem"
    return None
