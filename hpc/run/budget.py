"""How often a run may fail without progress, and how long it pauses before the next attempt. Pure; runs everywhere.

docs/explanation/recovery.md has the budgets as a table for users.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpc.run.causes import Cause, JobState, is_consequence

# The causes after which a run is over without having failed.
FINAL_CAUSES = frozenset({Cause.COMPLETED, Cause.CANCELLED})
# A failure at a step that is only so far from that of the one before is at the same step: ranks report the last step
# that they have finished, and a heartbeat is one step old at most.
_SAME_STEP = 2
# Before the ranks start again after the first, second, ... failure without progress. A fault that passes by itself, of
# storage or a network, lasts longer than a start of the ranks.
_PAUSES_SECONDS = (0.0, 10.0, 30.0, 90.0)
_ENDED_FROM_OUTSIDE = frozenset({Cause.PREEMPTED, Cause.REQUEUED, Cause.TIME_LIMIT})


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """The budget of some causes together: after so many failures without progress, a run has failed."""

    causes: frozenset[Cause]
    failures: int
    pauses: bool = False


# Causes without a rule come from outside the run and are free: preemptions, requeues.
_RULES = (
    # Only a person can repair these; after a divergence, the next attempt would diverge at the same step.
    _Rule(causes=frozenset({Cause.BAD_INPUT, Cause.NO_SPACE, Cause.DIVERGED}), failures=1),
    _Rule(
        causes=frozenset({Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.HANG, Cause.LOST, Cause.TIME_LIMIT}),
        failures=5,
        pauses=True,
    ),
    # Each bad node is excluded from the next attempt; after five, the run itself is the likely cause.
    _Rule(causes=frozenset({Cause.BAD_NODE}), failures=5),
    _Rule(causes=frozenset({Cause.NODE_FAILURE}), failures=5),
)


def _rule(cause: str | None) -> _Rule | None:
    return next((rule for rule in _RULES if cause in rule.causes), None)


@dataclass(frozen=True, kw_only=True)
class PastInterruption:
    """An interruption, or the end of an attempt, as far as the budgets need it."""

    cause: str
    step: int | None = None
    """The last step that was done; None if that is unknown."""
    restored_step: int | None = None
    """The step from which the interrupted ranks had started; None if they had not yet, and of a user's script."""
    signature: str | None = None
    """What the same failure would say the next time; None if two that look alike need not be the same."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run has used of its budgets, by its last interruption."""

    cause: str | None = None
    """Of the last interruption; None if there is none."""
    row: tuple[str, ...] = ()
    """The causes since the last progress."""
    is_repeated: bool = False
    """Whether the last interruption is the same failure as the one before."""

    @property
    def failures(self) -> int:
        """Failures without progress of the last one's kind, itself included."""
        rule = _rule(self.cause)
        return sum(cause in rule.causes for cause in self.row) if rule else 0

    @property
    def may_restart(self) -> bool:
        """Whether the run restarts after the last interruption."""
        rule = _rule(self.cause)
        used_up = rule is not None and self.failures >= rule.failures
        return self.cause not in FINAL_CAUSES and not used_up and not self.is_repeated

    @property
    def pause_seconds(self) -> float:
        """How long the ranks wait before they start again after the last interruption."""
        rule = _rule(self.cause)
        if rule is None or not rule.pauses:
            return 0.0
        return _PAUSES_SECONDS[min(max(self.failures, 1), len(_PAUSES_SECONDS)) - 1]

    @property
    def used(self) -> list[dict[str, Any]]:
        """What is used of each budget: causes, failures, of how many."""
        found = [(rule, [cause for cause in self.row if cause in rule.causes]) for rule in _RULES]
        return [
            {"causes": list(dict.fromkeys(own)), "failures": len(own), "budget": rule.failures}
            for rule, own in found
            if own
        ]


def budget_after(history: Iterable[PastInterruption]) -> Budget:
    """The budget after all interruptions and ends of a run, in order.

    Ranks that start from a later step than those of the failure before show progress: steps that were done and lost
    are none. A user's script, whose steps are unknown, made some if it was ended from outside. A time limit counts
    only if its attempt did no step, for example when staging takes longer than the limit.
    """
    budget, before, restored = Budget(), None, 0
    for one in history:
        rule, row = _rule(one.cause), budget.row
        trained = one.restored_step is not None and (one.step or 0) > one.restored_step
        if one.restored_step is not None:
            row, restored = (() if one.restored_step > restored else row), one.restored_step
        if one.cause in _ENDED_FROM_OUTSIDE and one.step is None:
            rule, row = None, ()
        if rule is None or (one.cause == Cause.TIME_LIMIT and trained):
            budget = Budget(cause=one.cause, row=row)
            continue
        repeated = before is not None and _is_same(before, one)
        budget, before = Budget(cause=one.cause, row=(*row, one.cause), is_repeated=repeated), one
    return budget


def _is_same(one: PastInterruption, other: PastInterruption) -> bool:
    """Whether two failures are the same: of one signature, at the same step if that is known."""
    # A time limit has none; it is a failure only where no step was done.
    known = one.signature is not None or one.cause == Cause.TIME_LIMIT
    if not known or (one.cause, one.signature) != (other.cause, other.signature):
        return False
    return one.step is None or other.step is None or abs(one.step - other.step) <= _SAME_STEP


def signature_of(message: str) -> str:
    """What stays of a message from one time to another: its numbers and addresses change."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", message)


def rank_signature(cause: str, signal: str | None, exit_code: int, detail: str, step: int | None) -> str | None:
    """The signature of a rank's failure; None if two that look alike need not be the same.

    A lost peer says nothing of what the peer died of. A SIGKILL comes from outside, and one rank after the other may
    get one as soon as they are back; what the kernel kills for lack of memory has a cause of its own. Nor does another
    signal, or a bad node, say enough without the step.
    """
    killed = signal == "SIGKILL" and cause != Cause.OUT_OF_MEMORY
    if is_consequence(detail) or killed or (step is None and (signal is not None or cause == Cause.BAD_NODE)):
        return None
    return f"{signal or exit_code}: {signature_of(detail)}"


def must_requeue(cause: Cause, job_state: JobState, *, may_restart: bool) -> bool:
    """Whether the agent must ask for the requeue, if the run may restart: Slurm does not do it by itself.

    Slurm requeues a job that lost a node; somebody's requeue is already pending. But it ends a job that still runs or
    has reached its time limit, and with PreemptMode=CANCEL one that it preempts.
    """
    not_requeued = {JobState.RUNNING, JobState.TIMEOUT, JobState.UNKNOWN}
    if cause is Cause.PREEMPTED:
        not_requeued |= {JobState.CANCELLED, JobState.PREEMPTED}
    return may_restart and cause not in FINAL_CAUSES and job_state in not_requeued
