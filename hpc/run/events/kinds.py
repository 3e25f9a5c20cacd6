"""The types of events of a run, each with its writer and its fields. Runs everywhere.

An event is one JSON object on one line of a file in `events/` (hpc.run.events.ledger): the fields below, `event` with
the name of its kind, and `time`. A field without a value is null or absent. Times are seconds since the epoch, nodes
are host names, node ranks and rounds are numbers.
"""

import re
from typing import Annotated, Any

from msgspec import Meta, Struct

from hpc.base.files import MOST

Time = Annotated[float, Meta(ge=-MOST, le=9e9)]
"""Seconds since the epoch, at most the year 2255, because pandas holds no time after 2262."""
UNDATED = -1.0
"""The time of an event that is not yet written."""
Number = Annotated[float, Meta(ge=-MOST, le=MOST)]
Int = Annotated[int, Meta(ge=-int(MOST), le=int(MOST))]


def _kind(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(Struct, frozen=True, kw_only=True, tag_field="event", tag=_kind):
    """The fields of all events. The writer of an attempt's file adds the attempt; every writer adds the time."""

    time: Time = UNDATED
    attempt: Int | None = None
    """The number of the attempt; None if the event belongs to no attempt, as the submission does."""

    @property
    def kind(self) -> str:
        """The name of the event's kind, as in the file."""
        return str(type(self).__struct_config__.tag)


# --- jobs ---


class Handover(Event, frozen=True, kw_only=True):
    """A process is about to submit a job of the run."""

    host: str
    pid: Int
    started: Int | None = None
    """Time at which the process started, in the kernel's clock ticks since the boot."""


class Submitting(Handover, frozen=True, kw_only=True):
    """`hpc submit` announces the first job of a new run."""

    cluster: str | None = None


class Submitted(Event, frozen=True, kw_only=True):
    """`hpc submit` has submitted the first job or, without Slurm, started the process that controls the run."""

    job_id: str
    cluster: str | None = None
    started: Int | None = None
    """Time at which the controlling process started, in clock ticks since the boot; None on Slurm."""
    stop_lead_seconds: Number | None = None
    """Seconds from the signal to stop to the time limit."""
    grace_seconds: Number | None = None
    """Seconds from SIGTERM to SIGKILL when Slurm preempts the job; None if unknown."""
    excluded: tuple[str, ...] = ()
    """The nodes that the job excludes."""


class Refused(Event, frozen=True, kw_only=True):
    """The first node's agent begins no attempt in this start of the job: the run is complete, waits or cannot start."""

    job_id: str
    restart: Int
    detail: str
    waits: bool = False
    """Whether the run waits for other runs, and the job returns to the queue."""


class Requeued(Event, frozen=True, kw_only=True):
    """An agent or the supervisor has requeued the job, or Slurm has, and accepts no new job."""

    job_id: str


class Resubmitting(Handover, frozen=True, kw_only=True):
    """An agent, the supervisor or `hpc resume` is about to submit the job that follows an attempt."""


class Resubmitted(Event, frozen=True, kw_only=True):
    """An agent, the supervisor or `hpc resume` has submitted the run's next job."""

    job_id: str
    excluded: tuple[str, ...]
    """The nodes that the job excludes."""
    old_job_id: str | None = None
    detail: str | None = None
    """The reason why the old job was not requeued."""


class Excluded(Event, frozen=True, kw_only=True):
    """An agent or the supervisor has changed the excluded nodes of a pending job."""

    job_id: str
    excluded: tuple[str, ...]


class Released(Event, frozen=True, kw_only=True):
    """The supervisor has ended the delay or the hold of a requeued job."""

    job_id: str | None = None


class Scancelled(Event, frozen=True, kw_only=True):
    """The supervisor has seen that the last job was cancelled with scancel."""

    job_id: str | None = None


class NotContinued(Event, frozen=True, kw_only=True):
    """An agent could neither requeue the job nor submit a new one."""

    detail: str


class Cancelled(Event, frozen=True, kw_only=True):
    """The user has called `hpc cancel`."""

    final: bool = False
    """Whether the user gave --final, after which nothing may resume the run."""


class Resumed(Event, frozen=True, kw_only=True):
    """The user has called `hpc resume`. `attempt` is the last attempt before it, or 0 if there was none."""

    cancellations: Int
    """The number of cancellations that no longer count."""
    number: Int = 1
    """The number of this resumption, from 1."""
    changed: dict[str, Any] = {}
    """The changed flags and their values."""
    revision: str | None = None
    """The commit of the code, if it changed."""
    stop_lead_seconds: Number | None = None
    grace_seconds: Number | None = None


# --- attempts and nodes ---


class Claimed(Event, frozen=True, kw_only=True):
    """The first node's agent has begun an attempt."""

    attempt: Int
    job_id: str
    restart: Int
    secret: str
    nodes: tuple[str, ...]
    port: Int = 0
    """The port on which this agent listens to the other agents."""
    addresses: tuple[str, ...] = ()
    start_once: bool = False
    """Whether no further attempt may follow, unless the user resumes the run."""


class Joined(Event, frozen=True, kw_only=True):
    """An agent has joined the attempt: it has reached the first node's agent."""

    node: str
    node_rank: Int | None = None


class Staging(Event, frozen=True, kw_only=True):
    """An agent reports the progress of a long copy, repeatedly."""

    node: str
    activity: str
    bytes_done: int | Number
    bytes_per_second: int | Number
    source: str | None = None
    bytes_total: int | Number | None = None
    eta_seconds: Number | None = None


class DataStaged(Event, frozen=True, kw_only=True, tag="staged"):
    """An agent has staged data or an environment; `jobs.staging.stager.Staged` describes the fields."""

    node: str
    source: str
    path: str | None = None
    reused: bool = False
    in_place: str | None = None
    seconds: Number = 0.0
    bytes_from_source: int = 0
    bytes_from_peers: int = 0
    fallback: str | None = None
    in_memory: bool = False


class EnvironmentStaged(Event, frozen=True, kw_only=True, tag="environment"):
    """An agent has staged the Python environment for --stage-env, or uses the shared one."""

    node: str
    python: str | None = None
    seconds: Number = 0.0
    fallback: str | None = None
    """The reason why the shared environment is used instead."""


class NodeFailed(Event, frozen=True, kw_only=True):
    """An agent reports its own failure, after which its node trains no more in this attempt."""

    node: str
    cause: str | None = None
    detail: str | None = None


class NodeLost(Event, frozen=True, kw_only=True):
    """The first node's agent has lost contact with a node, or another agent has lost contact with the first node."""

    node: str
    last_heard: Time | None = None
    detail: str | None = None


class NodeReturned(Event, frozen=True, kw_only=True):
    """The first node's agent has regained contact with a lost node."""

    node: str


class OfFailure(Event, frozen=True, kw_only=True):
    """Something ended or interrupted the training."""

    cause: str
    step: Int | None = None
    """The last step that any rank had done."""
    rank: Int | None = None
    node: str | None = None
    detail: str | None = None
    failed_at: Time | None = None
    signature: str | None = None
    """A text that all repetitions of a failure share (hpc.run.restart_budget)."""
    counted_steps: Int | None = None
    """The optimizer steps that a script had done since its ranks started, if it reports none; None if unknown."""


class Interrupted(OfFailure, frozen=True, kw_only=True, tag="interruption"):
    """The first node's agent reports a failure that the attempt survived."""

    noticed_at: Time | None = None
    round: Int | None = None
    pause_seconds: Number = 0.0
    """Seconds until the ranks start again."""


class AttemptEnded(OfFailure, frozen=True, kw_only=True):
    """An attempt has ended. The first node's agent records this or, if it could not, another process."""

    attempt: Int
    last_heard: Time | None = None
    """Time of the attempt's last heartbeat; None if one of its own agents recorded the end."""


# --- ranks ---


class RoundStarted(Event, frozen=True, kw_only=True, tag="rendezvous"):
    """The first node's agent has started a round of torchrun."""

    members: tuple[Int, ...]
    """The node ranks that train."""
    round: Int | None = None
    port: Int | None = None


class Checked(Event, frozen=True, kw_only=True):
    """The first node's agent records that these nodes have passed the preflight of a user's script."""

    nodes: tuple[str, ...]


class Preflight(Event, frozen=True, kw_only=True):
    """Rank 0 records the passed preflight: all devices have computed, and all ranks have communicated."""

    world_size: Int | None = None
    device: str | None = None
    """The models of the GPUs, or CPU."""
    allreduce_gb_per_second: Number | None = None
    seconds: Number | None = None


class Software(Event, frozen=True, kw_only=True):
    """Rank 0 records the versions of its software after the preflight."""

    torchrelay: str | None = None
    torch: str | None = None
    torchvision: str | None = None
    numpy: str | None = None
    pillow: str | None = None
    simplejpeg: str | None = None
    python: str | None = None
    platform: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None


class TrainStarted(Event, frozen=True, kw_only=True):
    """Rank 0 has restored the saved state, if there is one. It records this at every start of the ranks."""

    step: Int
    world_size: Int
    epoch: Int | None = None
    total_steps: Int | None = None
    restored_from: str | None = None
    source: str | None = None
    """The kind of saved state: `checkpoint` or `snapshot`."""
    train_seconds: Number = 0.0
    """Seconds of all steps up to the restored one."""
    seconds: Number | None = None
    """Seconds from the start of the process to this event."""
    connect_seconds: Number | None = None
    """Seconds from the start of the process until all ranks were connected."""
    restore_seconds: Number | None = None
    """Seconds to read and share the state."""


class FirstStep(Event, frozen=True, kw_only=True):
    """Rank 0 has done the first step since the ranks started."""

    step: Int


class TrainStopped(Event, frozen=True, kw_only=True):
    """Rank 0 has stopped after a signal; a training has saved its state."""

    step: Int | None = None
    signal: str | None = None
    seconds: Number | None = None
    """Seconds from the signal to the saved state."""


class TrainCompleted(Event, frozen=True, kw_only=True):
    """Rank 0 has finished the training."""

    step: Int | None = None
    ended: str | None = None
    """The reason for an early end, `patience` or `max_hours`; None after the last epoch."""


class Problem(Event, frozen=True, kw_only=True):
    """Rank 0 reports that something is wrong, or has changed, although the training goes on."""

    what: str
    """`checkpoint_failed`, `checkpoint_rejected`, `diverged`: the loss is not finite; `image_corrupt`; `unrepeatable`:
    operations have no deterministic kernel; `numerics_changed`: the next steps are rounded in another way."""
    step: Int | None = None
    rank: Int | None = None
    """The first rank whose loss was not finite; None if several ranks were first."""
    detail: str | None = None


class RankFailed(Event, frozen=True, kw_only=True):
    """The agent of a rank's node reports that the rank has exited with an error."""

    node: str = ""
    round: Int
    rank: Int
    restarts: Int = 0
    """As in RanksStarted."""
    started_at: Time = 0.0
    failed_at: Time
    exit_code: Int = 0
    signal: str | None = None
    cause: str
    step: Int | None = None
    """The last step that this rank had done."""
    detail: str = ""
    counted_steps: Int | None = None
    """The optimizer steps that the rank of a script had done since its start, if it reports none; None if unknown."""


class RanksStarted(Event, frozen=True, kw_only=True):
    """The first node's agent reports that all ranks of a round have started, or have been restarted together."""

    round: Int
    restarts: Int = 0
    """The number of times that the ranks have restarted together in this round."""
    world_size: Int


class RanksEnded(Event, frozen=True, kw_only=True):
    """The first node's agent reports that these ranks have ended with exit code 0 while the others run."""

    ranks: tuple[Int, ...]


class RanksSilent(Event, frozen=True, kw_only=True):
    """The first node's agent reports that a script's ranks, which send no heartbeats, are idle, or are busy again."""

    seconds: Number
    """Seconds since a rank last used the processor, read or wrote; 0 if the ranks do something again."""


class SlowRank(Event, frozen=True, kw_only=True):
    """The first node's agent reports a rank for which all other ranks wait."""

    rank: Int
    node: str
    busy_seconds: Number
    median_seconds: Number


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """Rank 0 has saved a checkpoint."""

    step: Int | None = None
    seconds: Number
    copy_seconds: Number


class SnapshotSaved(Event, frozen=True, kw_only=True):
    """An agent has saved a snapshot as a checkpoint."""

    step: Int | None = None
    seconds: Number | None = None


class SnapshotOff(Event, frozen=True, kw_only=True):
    """Rank 0 cannot write snapshots."""

    reason: str


# --- messages and trackers ---


class OfMessage(Event, frozen=True, kw_only=True):
    """A process on a node, or the supervisor, sends a message to a recipient."""

    notice: str
    recipient: str


class Notifying(OfMessage, frozen=True, kw_only=True):
    """The process is about to send the message."""


class NotificationSent(OfMessage, frozen=True, kw_only=True):
    """The process has sent the message."""


class NotificationFailed(OfMessage, frozen=True, kw_only=True):
    """The process could not send the message."""

    reason: str


class OfTracker(Event, frozen=True, kw_only=True):
    """A process of the first node sends the metrics to a tracker."""

    service: str


class Tracking(OfTracker, frozen=True, kw_only=True):
    """The process has connected to the tracker."""

    url: str | None = None


class TrackingFailed(OfTracker, frozen=True, kw_only=True):
    """The process could not send the metrics."""

    reason: str


def _leaves(kind: type[Event]) -> list[type[Event]]:
    return [leaf for below in kind.__subclasses__() for leaf in _leaves(below)] or [kind]


KINDS = tuple(_leaves(Event))
