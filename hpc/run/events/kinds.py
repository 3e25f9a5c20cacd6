"""The events of a run: one type for each kind, with who writes it and its fields. Runs everywhere.

An event is one JSON object on one line of a file in `events/` (hpc.run.events.ledger): the fields below, `event` with
the name of its kind, and `time`. A field without a value is null or absent. Times are seconds since the epoch, nodes
are host names, node ranks and rounds are numbers.
"""

import re
from typing import Annotated, Any

from msgspec import Meta, Struct

from hpc.base.files import MOST

Time = Annotated[float, Meta(ge=-MOST, le=9e9)]
"""Seconds since the epoch, until the year 2255: pandas ends in 2262."""
UNDATED = -1.0
"""The time of an event that is not yet written."""
Number = Annotated[float, Meta(ge=-MOST, le=MOST)]
Int = Annotated[int, Meta(ge=-int(MOST), le=int(MOST))]


def _kind(name: str) -> str:
    """Return the name of a kind of event: that of its class, in lower case with underscores."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(Struct, frozen=True, kw_only=True, tag_field="event", tag=_kind):
    """What all events have. The writer of an attempt's file adds the attempt; every writer adds the time."""

    time: Time = UNDATED
    attempt: Int | None = None
    """None for what belongs to no attempt, such as the submission."""

    @property
    def kind(self) -> str:
        """The name of its kind, as in the file."""
        return str(type(self).__struct_config__.tag)


# --- jobs ---


class Handover(Event, frozen=True, kw_only=True):
    """A process is about to submit a job of the run."""

    host: str
    pid: Int
    started: Int | None = None
    """When the process started, in the kernel's clock ticks since the boot."""


class Submitting(Handover, frozen=True, kw_only=True):
    """`hpc submit`, in the directory of a new run."""

    cluster: str | None = None


class Submitted(Event, frozen=True, kw_only=True):
    """`hpc submit` has submitted the first job; without Slurm: the process that controls the run has started."""

    job_id: str
    cluster: str | None = None
    started: Int | None = None
    """When the controlling process started, in clock ticks since the boot; None on Slurm."""
    stop_lead_seconds: Number | None = None
    """How long before the time limit the signal to stop comes."""
    grace_seconds: Number | None = None
    """How long the processes of a preempted job live; None if unknown."""


class StartedNothing(Event, frozen=True, kw_only=True):
    """The head node's agent: this start of the job makes no attempt."""

    job_id: str
    restart: Int
    detail: str


class Refused(StartedNothing, frozen=True, kw_only=True):
    """The reason will stay."""


class Deferred(StartedNothing, frozen=True, kw_only=True):
    """The run waits for others."""


class Requeued(Event, frozen=True, kw_only=True):
    """The head node's agent, or the supervisor, has requeued the job."""

    job_id: str


class Resubmitting(Handover, frozen=True, kw_only=True):
    """An agent, the supervisor or `hpc resume`, after an attempt."""


class Resubmitted(Event, frozen=True, kw_only=True):
    """An agent, the supervisor or `hpc resume` has submitted the run's next job."""

    job_id: str
    excluded: tuple[str, ...]
    """The nodes that the job excludes."""
    old_job_id: str | None = None


class Excluded(Event, frozen=True, kw_only=True):
    """An agent or the supervisor has changed the excluded nodes of a pending job."""

    job_id: str
    excluded: tuple[str, ...]


class Released(Event, frozen=True, kw_only=True):
    """The supervisor has ended Slurm's requeue delay or hold."""

    job_id: str | None = None


class Scancelled(Event, frozen=True, kw_only=True):
    """The supervisor has seen that the last job was cancelled with scancel."""

    job_id: str | None = None


class NotContinued(Event, frozen=True, kw_only=True):
    """An agent could not start the next attempt."""

    detail: str


class Cancelled(Event, frozen=True, kw_only=True):
    """`hpc cancel`."""

    by: str | None = None
    final: bool = False
    """Nothing may resume the run."""


class Resumed(Event, frozen=True, kw_only=True):
    """`hpc resume`; `attempt` is the last one before it, or 0."""

    cancellations: Int
    """How many cancellations no longer count."""
    number: Int = 1
    """Of this resumption, from 1."""
    by: str | None = None
    changed: dict[str, Any] = {}
    """The changed flags, with their values."""
    revision: str | None = None
    """The commit of the code, if that is new."""
    stop_lead_seconds: Number | None = None
    grace_seconds: Number | None = None


class Notified(Event, frozen=True, kw_only=True):
    """The supervisor is about to call the command of --on-end."""

    state: str


# --- attempts and nodes ---


class Claimed(Event, frozen=True, kw_only=True):
    """The head node's agent has begun an attempt."""

    attempt: Int
    job_id: str
    restart: Int
    secret: str
    nodes: tuple[str, ...]
    port: Int = 0
    """On which it listens to the other agents."""
    addresses: tuple[str, ...] = ()


class Joined(Event, frozen=True, kw_only=True):
    """Every agent, when it has met the head node's."""

    node: str
    node_rank: Int | None = None
    clock_skew_seconds: Number | None = None
    tmp_free_bytes: int | None = None
    shm_free_bytes: int | None = None


class Staging(Event, frozen=True, kw_only=True):
    """An agent whose copy takes long, again and again."""

    node: str
    activity: str
    bytes_done: int | Number
    bytes_per_second: int | Number
    source: str | None = None
    bytes_total: int | Number | None = None
    eta_seconds: Number | None = None


class DataStaged(Event, frozen=True, kw_only=True, tag="staged"):
    """Every agent, for each source that it has copied; see `jobs.staging.stager.Staged`."""

    node: str
    source: str
    path: str | None = None
    per_job: bool = False
    """The cluster deletes the copy with the job."""
    reused: bool = False
    in_place: str | None = None
    seconds: Number = 0.0
    bytes_from_source: int = 0
    bytes_from_peers: int = 0
    fallback: str | None = None
    repaired: Int = 0
    evicted: tuple[str, ...] = ()
    in_memory: bool = False
    shared: str | None = None


class Packed(Event, frozen=True, kw_only=True):
    """Every agent, with --pack."""

    node: str
    path: str
    seconds: Number


class EnvironmentStaged(Event, frozen=True, kw_only=True, tag="environment"):
    """Every agent, with --stage-env."""

    node: str
    python: str | None = None
    seconds: Number = 0.0
    fallback: str | None = None
    """Why the shared environment is used."""


class NodeFailed(Event, frozen=True, kw_only=True):
    """The agent that failed."""

    node: str
    cause: str | None = None
    detail: str | None = None


class MemoryEmptied(Event, frozen=True, kw_only=True):
    """An agent whose directory in memory was removed, and created again."""

    node: str
    detail: str | None = None


class NotForked(Event, frozen=True, kw_only=True):
    """An agent whose ranks were not forked, because forks of torchrun could not use GPUs."""

    node: str
    detail: str


class NodeLost(Event, frozen=True, kw_only=True):
    """The head node's agent, or a surviving one."""

    node: str
    last_heard: Time | None = None
    detail: str | None = None


class NodeReturned(Event, frozen=True, kw_only=True):
    """The head node's agent: the link to a lost node is back."""

    node: str


class Interrupted(Event, frozen=True, kw_only=True, tag="interruption"):
    """The head node's agent: a failure that the attempt survived."""

    cause: str
    step: Int | None = None
    """The last step that any rank had done."""
    rank: Int | None = None
    node: str | None = None
    detail: str | None = None
    failed_at: Time | None = None
    noticed_at: Time | None = None
    round: Int | None = None
    signature: str | None = None
    """By which the same failure is known (hpc.run.causes)."""
    pause_seconds: Number = 0.0
    """Before the ranks start again."""


class AttemptEnded(Event, frozen=True, kw_only=True):
    """The head node's agent, its successor, or the supervisor: an attempt has ended."""

    attempt: Int
    cause: str
    step: Int | None = None
    """The last step that any rank had done."""
    detail: str | None = None
    last_heard: Time | None = None
    """The last sign of life of agents that recorded nothing."""
    failed_at: Time | None = None
    rank: Int | None = None
    node: str | None = None
    signature: str | None = None


# --- ranks ---


class RoundStarted(Event, frozen=True, kw_only=True, tag="rendezvous"):
    """The head node's agent has started a round of torchrun."""

    members: tuple[Int, ...]
    """The node ranks that train."""
    round: Int | None = None
    port: Int | None = None


class Checked(Event, frozen=True, kw_only=True):
    """The head node's agent: the preflight before a user's script has passed."""

    nodes: tuple[str, ...]


class Preflight(Event, frozen=True, kw_only=True):
    """Rank 0, after all devices have computed and all ranks have communicated."""

    world_size: Int | None = None
    device: str | None = None
    """The models of the GPUs, or CPU."""
    allreduce_gb_per_second: Number | None = None
    seconds: Number | None = None


class Software(Event, frozen=True, kw_only=True):
    """Rank 0, after the preflight: the versions of what it runs with."""

    torchrelay: str | None = None
    torch: str | None = None
    torchvision: str | None = None
    numpy: str | None = None
    pillow: str | None = None
    python: str | None = None
    platform: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None


class TrainStarted(Event, frozen=True, kw_only=True):
    """Rank 0, at every start of the ranks, when the state is restored."""

    step: Int
    world_size: Int
    epoch: Int | None = None
    total_steps: Int | None = None
    restored_from: str | None = None
    source: str | None = None
    """`checkpoint` or `snapshot`."""
    train_seconds: Number = 0.0
    """The time of all steps until the restored one."""
    seconds: Number | None = None
    """Since the start of the process."""
    connect_seconds: Number | None = None
    """Since then until all ranks were connected."""
    restore_seconds: Number | None = None
    """Time to read and share the state."""
    gradient_bytes: Int | None = None


class NumericsChanged(Event, frozen=True, kw_only=True):
    """Rank 0: what the rounding depends on has changed since the restored state, such as torch."""

    step: Int
    changes: tuple[str, ...] = ()


class Unrepeatable(Event, frozen=True, kw_only=True):
    """Rank 0, unless --deterministic is off: operations of the model have no deterministic kernel."""

    operations: tuple[str, ...] = ()


class FirstStep(Event, frozen=True, kw_only=True):
    """Rank 0, after the first step since the ranks started."""

    step: Int


class TrainStopped(Event, frozen=True, kw_only=True):
    """Rank 0 has stopped and saved the step."""

    step: Int | None = None
    signal: str | None = None
    seconds: Number | None = None
    """From the signal to the saved state."""


class TrainCompleted(Event, frozen=True, kw_only=True):
    """Rank 0 has finished the training."""

    step: Int | None = None
    ended: str | None = None
    """`patience` or `max_hours`; None for the last epoch."""
    learned_nothing: str | None = None
    """A sentence with the numbers, if the model has learned nothing."""


class Diverged(Event, frozen=True, kw_only=True):
    """Rank 0: a loss is not finite."""

    step: Int | None = None
    loss: str | None = None


class ImageCorrupt(Event, frozen=True, kw_only=True):
    """Rank 0."""

    path: str


class RankFailed(Event, frozen=True, kw_only=True):
    """The agent of the rank's node."""

    round: Int
    rank: Int
    failed_at: Time
    node: str | None = None
    exit_code: Int | None = None
    signal: str | None = None
    cause: str | None = None
    step: Int | None = None
    """The last step that this rank had done."""
    detail: str | None = None
    started_at: Time | None = None


class SlowRank(Event, frozen=True, kw_only=True):
    """The head node's agent: all other ranks wait for this one."""

    rank: Int
    node: str
    busy_seconds: Number
    median_seconds: Number


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """Rank 0."""

    step: Int | None = None
    seconds: Number
    copy_seconds: Number


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """Rank 0."""

    step: Int | None = None
    reason: str | None = None


class CheckpointRejected(Event, frozen=True, kw_only=True):
    """Rank 0: a checkpoint is damaged, so an older one is restored."""

    path: str
    reason: str | None = None


class SnapshotSaved(Event, frozen=True, kw_only=True):
    """The agent that has saved a snapshot as a checkpoint."""

    step: Int | None = None
    seconds: Number | None = None


class SnapshotOff(Event, frozen=True, kw_only=True):
    """Rank 0: snapshots cannot be written."""

    reason: str


# --- messages and trackers ---


class OfMessage(Event, frozen=True, kw_only=True):
    """A process on a node, or the supervisor's, that sends a message."""

    notice: str
    recipient: str


class Notifying(OfMessage, frozen=True, kw_only=True):
    """It is about to send the message."""

    host: str | None = None


class NotificationSent(OfMessage, frozen=True, kw_only=True):
    """It has sent the message."""


class NotificationFailed(OfMessage, frozen=True, kw_only=True):
    """It could not send the message."""

    reason: str


class OfTracker(Event, frozen=True, kw_only=True):
    """The process of the head node that sends the metrics."""

    service: str


class Tracking(OfTracker, frozen=True, kw_only=True):
    """It sends them."""

    url: str | None = None


class TrackingFailed(OfTracker, frozen=True, kw_only=True):
    """It could not send them."""

    reason: str


def _leaves(kind: type[Event]) -> list[type[Event]]:
    return [leaf for below in kind.__subclasses__() for leaf in _leaves(below)] or [kind]


KINDS = tuple(_leaves(Event))
"""All kinds of events."""
