"""The types of the JSON document of `hpc status`. Unknown values are None. Times are seconds since the epoch."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct, to_builtins

from hpc.run.events.history import State
from hpc.run.events.interruptions import Interruption
from hpc.run.spec import Service

TERMINAL = frozenset({"completed", "failed", "cancelled"})


class AttemptSummary(Struct, frozen=True, kw_only=True):
    """One attempt."""

    attempt: int
    job_id: str
    nodes: tuple[str, ...]
    members: tuple[str, ...]
    started: float
    ended: float | None
    cause: str | None
    first_step: int | None
    last_step: int | None
    detail: str | None


class StagingProgress(Struct, frozen=True, kw_only=True):
    """The progress of the slowest node that stages data."""

    node: str
    activity: str
    bytes_done: int | float | None
    bytes_total: int | float | None
    bytes_per_second: int | float | None
    eta_seconds: float | None


class AwaitedRun(Struct, frozen=True, kw_only=True):
    """A run that must end before this one begins (--after, --after-ok)."""

    run: str
    run_dir: str
    until: Literal["ended", "completed"]
    problem: str | None
    """Why it will not end or complete; known only with the queue."""


class UnsentMessage(Struct, frozen=True, kw_only=True):
    """A message of --notify that is being sent, or could not be."""

    notice: str
    recipient: str
    problem: str | None
    """Why it could not be sent; None while it is being sent."""


class TrackerState(Struct, frozen=True, kw_only=True):
    """A tracker to which the metrics are sent."""

    tracker: Service
    url: str | None
    problem: str | None
    """Why a node of the last attempt could not send the metrics."""


class LastOutput(Struct, frozen=True, kw_only=True):
    """The last line that rank 0 of a script without steps has printed."""

    line: str
    time: float


class WrittenFiles(Struct, frozen=True, kw_only=True):
    """Files that a script has created or changed in its working directory."""

    path: str
    """A file, or, with a final slash, a directory that the script has made."""
    files: int


class Summary(Struct, frozen=True, kw_only=True):
    """A run, as `hpc status --json` shows it. A value that is not known is None; times are seconds since the epoch."""

    run: str
    run_dir: str
    job_id: str | None
    state: State
    attempt: int | None
    attempts: tuple[AttemptSummary, ...]
    epoch: float | None
    step: float | None
    counted_steps: int | None
    """The steps that a script which reports none has done since its ranks last started."""
    steps_per_second: float | None
    """The pace of the counted steps, while the run trains."""
    snapshot_seconds: float | None
    """Seconds since the newest snapshot, while the run trains. Rank 0 records it every 5 s at most."""
    snapshot_bytes: int | None
    """Memory of a node that snapshots take."""
    total_steps: int | None
    world_size: int | None
    device: str | None
    images_per_second: float | None
    train_loss: float | None
    val_accuracy: float | None
    test_accuracy: float | None
    best_test_accuracy: float | None
    model: str | None
    """The file of the final model; None unless a training has completed."""
    steps_lost: int | None
    partition: str | None
    gpus: int | None
    """GPUs of the last attempt, spares included."""
    gpu_type: str | None
    elapsed_seconds: float | None
    queue_seconds: float | None
    gpu_hours: float | None
    """Hours of all GPUs, spares included, outside of the queue."""
    goodput: float | None
    """The productive share of the time."""
    interruptions: tuple[Interruption, ...]
    budget: Sequence[str]
    """A line for each failure limit that counts a failure (docs/explanation/recovery.md)."""
    warnings: Sequence[str]
    damaged: Sequence[str]
    """One sentence for each damaged file or line, which was left out."""
    staging: StagingProgress | None
    unsent: tuple[UnsentMessage, ...]
    trackers: tuple[TrackerState, ...]
    reason: str | None
    """Why the run has no job, or waits."""
    starts_at: float | None
    why_new_job: str | None
    """Why the run continues in this job instead of the one before, which was not requeued."""
    detail: str | None
    """How the last attempt ended."""
    traceback: Sequence[str] | None
    """The last traceback of the rank that ended a failed run."""
    last_output: LastOutput | None
    eta_seconds: float | None
    waits_for: tuple[AwaitedRun, ...]
    written: tuple[WrittenFiles, ...] | None = None
    """The files of the script in the run's `code/`; None unless the run is named, or after --wait."""

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        document: dict[str, Any] = to_builtins(self)
        return document
