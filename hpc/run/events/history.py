"""The history of a run: its events, read once, and conclusions from them. Pure except `load`; runs everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar, cast

from hpc.run.causes import Cause
from hpc.run.events import ledger
from hpc.run.events.attempts import Attempt, attempts_of, budget_now, may_restart_after
from hpc.run.events.kinds import (
    Cancelled,
    CheckpointSaved,
    Claimed,
    Event,
    Handover,
    NodeLost,
    NodeReturned,
    NotContinued,
    Requeued,
    Resubmitted,
    Resumed,
    Scancelled,
    Submitted,
    TrainStarted,
    TrainStopped,
)  # fmt: skip
from hpc.run.restart_budget import FINAL_CAUSES, Budget
from hpc.run.rundir import RunDir

Outcome = Literal["completed", "failed", "cancelled"]
"""The ways in which a run can end."""
State = Literal["pending", "running", "completed", "failed", "cancelled"]
"""The states of a run: waiting, running, or ended in one of the ways of `Outcome`."""
_Kind = TypeVar("_Kind", bound=Event)


@dataclass(frozen=True)
class History:
    """All events of a run until now."""

    events: Sequence[Event] = ()
    """The events, in the order of their times."""
    damage: Sequence[str] = ()
    """One sentence for each line that could not be read."""
    complete: bool = False
    """Whether the run directory has the final result."""

    @classmethod
    def load(cls, run: RunDir) -> "History":
        """Read the history of a run."""
        return cls(*ledger.read_with_damage(run.events), complete=run.final_result.exists())

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the events of one kind."""
        indexes = sorted(at for own, places in self._places.items() if issubclass(own, kind) for at in places)
        return [cast("_Kind", self.events[at]) for at in indexes]

    def last(self, kind: type[_Kind]) -> _Kind | None:
        """Return the newest event of one kind; None if there is none."""
        newest = [places[-1] for own, places in self._places.items() if issubclass(own, kind)]
        return cast("_Kind", self.events[max(newest)]) if newest else None

    @cached_property
    def _places(self) -> dict[type[Event], list[int]]:
        """For each kind, the indexes of its events. Commands ask long histories for many kinds, most of them rare."""
        places: dict[type[Event], list[int]] = {}
        for at, event in enumerate(self.events):
            places.setdefault(type(event), []).append(at)
        return places

    def during(self, attempt: int | None) -> "History":
        """Return the events of one attempt; for None, the events that belong to no attempt."""
        return History([event for event in self.events if event.attempt == attempt])

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts, in order."""
        return attempts_of(self.events)

    @property
    def last_attempt(self) -> Attempt | None:
        """The newest attempt; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @property
    def budget(self) -> Budget:
        """How much of its failure limits the run has used since its user last resumed it."""
        return budget_now(self.attempts)

    @property
    def may_restart(self) -> bool:
        """Whether another attempt may follow the last one. A last attempt without a recorded end counts as lost."""
        return may_restart_after(self.attempts)

    @property
    def is_cancelled(self) -> bool:
        """Whether the user has cancelled the run, and not resumed it since.

        Cancellations are counted instead of compared by time, because the clocks of two machines differ.
        """
        taken_back = max((event.cancellations for event in self.of(Resumed)), default=0)
        return len(self.of(Cancelled)) > taken_back

    @property
    def is_cancelled_for_good(self) -> bool:
        """Whether the user has cancelled the run with --final."""
        return any(event.final for event in self.of(Cancelled))

    @property
    def is_scancelled(self) -> bool:
        """Whether a supervisor has recorded that the run's newest job was cancelled with scancel."""
        return any(event.job_id == self.last_job_id for event in self.of(Scancelled))

    @property
    def is_complete(self) -> bool:
        """Whether the run has finished, even if its user cancelled it at the same moment."""
        last = self.last_attempt
        return self.complete or (last is not None and last.cause == Cause.COMPLETED and not last.resumed)

    @property
    def outcome(self) -> Outcome | None:
        """The way in which the run has ended, according to its events and its result; None if it goes on."""
        last = self.last_attempt
        if self.complete:
            return "completed"
        if self.is_cancelled or self.is_scancelled:
            return "cancelled"
        if last is None or last.cause is None or last.resumed:
            return None
        if last.cause == Cause.COMPLETED:
            return "completed"
        if last.cause == Cause.CANCELLED:
            return "cancelled"
        stopped = self.not_continued is not None or not self.may_restart
        return "failed" if last.cause not in FINAL_CAUSES and stopped else None

    @property
    def not_continued(self) -> str | None:
        """The reason why no job could be started after the last attempt; None if no agent has recorded one."""
        last = self.last_attempt
        own = self.during(last.attempt).of(NotContinued) if last else []
        return own[0].detail if own else None

    @property
    def last_job_id(self) -> str | None:
        """The id of the run's newest job; None before the first."""
        # The order of attempts counts before the times of events, because nodes' clocks differ, and may be set.
        order = {"submitted": 0, "claimed": 1, "requeued": 2, "resubmitted": 2}
        starts = [event for event in self.events if isinstance(event, Submitted | Claimed | Requeued | Resubmitted)]
        newest = sorted(starts, key=lambda event: (event.attempt or 0, order[event.kind]))[-1:]
        return next((event.job_id for event in newest), None)

    @property
    def job_ids(self) -> set[str]:
        """The ids of all jobs that the events name."""
        ids = (getattr(event, "job_id", None) for event in self.events)
        return {job_id for job_id in ids if job_id}

    @property
    def lost_nodes(self) -> list[str]:
        """The nodes that are lost now. A node is listed as often as its loss was reported."""
        lost = list[str]()
        for event in self.events:
            if isinstance(event, NodeLost):
                lost.append(event.node)
            elif isinstance(event, NodeReturned):
                lost = [node for node in lost if node != event.node]
        return lost

    def unfinished_handover(self, attempt: int) -> Handover | None:
        """Return the unfinished claim to submit the job after `attempt` (0: the first job); None if there is none."""
        kinds = Handover | Submitted | Resubmitted | Requeued
        own = [event for event in self.events if isinstance(event, kinds) and (event.attempt or 0) == attempt]
        return own[-1] if own and isinstance(own[-1], Handover) else None

    @property
    def knows_steps(self) -> bool:
        """Whether the ranks recorded the step from which they started, as the classifier and `with state(...)` do."""
        return bool(self.of(TrainStarted))

    @property
    def save_seconds(self) -> float | None:
        """Seconds of the longest save, either of a checkpoint or after a signal to stop; None before the first save."""
        stops = [event.seconds for event in self.of(TrainStopped) if event.seconds is not None]
        saves = [event.seconds + event.copy_seconds for event in self.of(CheckpointSaved)]
        return max([*stops, *saves], default=None)
