"""How often a run may fail without progress, and how long it pauses before the next attempt. Pure; runs everywhere.

docs/explanation/recovery.md has the budgets as a table for users.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpc.run.causes import Cause, JobState, is_consequence

# Causes that end a run without a failure.
FINAL_CAUSES = frozenset({Cause.COMPLETED, Cause.CANCELLED})
# Two failures at most this many steps apart are at the same step: ranks report the last step that they have finished,
# and a heartbeat is at most one step old.
_SAME_STEP = 2
# Pauses before the ranks start again after the first, second, ... failure without progress. A fault of storage or a
# network that passes by itself lasts longer than a start of the ranks.
_PAUSES_SECONDS = (0.0, 10.0, 30.0, 90.0)
# Ranks whose steps are unknown have made progress if they ran for longer: for gloo, torch's own timeout of a collective
# is half an hour, so ranks that hang from their start end earlier.
_LONG_SECONDS = 3600.0
_ENDED_FROM_OUTSIDE = frozenset({Cause.PREEMPTED, Cause.REQUEUED, Cause.TIME_LIMIT})


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """The budget that some causes share: a run fails at this number of failures without progress."""

    causes: frozenset[Cause]
    failures: int
    pauses: bool = False


# Causes without a rule, such as preemptions and requeues, come from outside the run and are free.
_RULES = (
    # Only a person can repair these, except a divergence, which the next attempt would repeat at the same step.
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
    """What the budgets need to know of an interruption or of the end of an attempt."""

    cause: str
    step: int | None = None
    """The last step that was done; None if unknown."""
    restored_step: int | None = None
    """The step from which the interrupted ranks had started; None if they had not started, or in a user's script."""
    signature: str | None = None
    """The text by which the same failure is recognized; None if two failures that look alike need not be the same."""
    ran_seconds: float = 0.0
    """How long the interrupted ranks had run."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The use of a run's budgets, as of its last interruption."""

    cause: str | None = None
    """The cause of the last interruption; None if there is none."""
    row: tuple[str, ...] = ()
    """The causes since the last progress."""
    is_repeated: bool = False
    """Whether the last interruption is the same failure as the one before."""

    @property
    def failures(self) -> int:
        """The number of failures without progress in the last one's budget, itself included; 0 if it has no budget."""
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
        """Seconds for which the ranks wait before they start again."""
        rule = _rule(self.cause)
        if rule is None or not rule.pauses:
            return 0.0
        return _PAUSES_SECONDS[min(max(self.failures, 1), len(_PAUSES_SECONDS)) - 1]

    @property
    def used(self) -> list[dict[str, Any]]:
        """For each budget in use: its causes, its failures, and the number that it allows."""
        found = [(rule, [cause for cause in self.row if cause in rule.causes]) for rule in _RULES]
        return [
            {"causes": list(dict.fromkeys(own)), "failures": len(own), "budget": rule.failures}
            for rule, own in found
            if own
        ]


def budget_after(history: Iterable[PastInterruption]) -> Budget:
    """Return the use of a run's budgets after all its interruptions and ends of attempts, given in order.

    The run has made progress if ranks started from a later step than the ranks before them; steps that were done but
    lost do not count. A user's script, whose steps are unknown, has made progress if it was ended from outside, or had
    run for an hour. A time limit is a failure only if its attempt did no step, for example because staging takes longer
    than the limit.
    """
    budget, before, restored = Budget(), None, 0
    for one in history:
        rule, row = _rule(one.cause), budget.row
        trained = one.restored_step is not None and (one.step or 0) > one.restored_step
        if one.restored_step is not None:
            row, restored = (() if one.restored_step > restored else row), one.restored_step
        if one.step is None and one.cause in _ENDED_FROM_OUTSIDE:
            rule, row = None, ()
        elif one.step is None and one.ran_seconds > _LONG_SECONDS:
            row, before = (), None
        if rule is None or (one.cause == Cause.TIME_LIMIT and trained):
            budget = Budget(cause=one.cause, row=row)
            continue
        repeated = before is not None and _is_same(before, one)
        budget, before = Budget(cause=one.cause, row=(*row, one.cause), is_repeated=repeated), one
    return budget


def _is_same(one: PastInterruption, other: PastInterruption) -> bool:
    """Return whether two failures have the same signature and happened at the same step, if that is known."""
    # A time limit has no signature; it is a failure only if no step was done.
    known = one.signature is not None or one.cause == Cause.TIME_LIMIT
    if not known or (one.cause, one.signature) != (other.cause, other.signature):
        return False
    return one.step is None or other.step is None or abs(one.step - other.step) <= _SAME_STEP


def signature_of(message: str) -> str:
    """Return a message without its numbers and addresses, which change from one failure to the next."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", message)


def rank_signature(cause: str, signal: str | None, exit_code: int, detail: str, step: int | None) -> str | None:
    """Return the signature of a rank's failure; None if two failures that look alike need not be the same.

    There is none for a message about a lost peer, which does not say why the peer died. There is none for a SIGKILL,
    unless memory ran out: it comes from outside, and may hit one rank after the other as soon as they are back. Another
    signal, or a bad node, has one only if the step is known.
    """
    killed = signal == "SIGKILL" and cause != Cause.OUT_OF_MEMORY
    if is_consequence(detail) or killed or (step is None and (signal is not None or cause == Cause.BAD_NODE)):
        return None
    return f"{signal or exit_code}: {signature_of(detail)}"


def must_requeue(cause: Cause, job_state: JobState, *, may_restart: bool) -> bool:
    """Return whether the agent must ask Slurm to requeue the job of a run that may restart, because Slurm only ends it.

    Slurm by itself requeues a job that lost a node, and a job that somebody else has requeued is pending already. Slurm
    only ends a job that still runs, has reached its time limit, or whose batch script was killed, and with
    PreemptMode=CANCEL one that it preempts.
    """
    not_requeued = {JobState.RUNNING, JobState.TIMEOUT, JobState.FAILED, JobState.UNKNOWN}
    if cause is Cause.PREEMPTED:
        not_requeued |= {JobState.CANCELLED, JobState.PREEMPTED}
    return may_restart and cause not in FINAL_CAUSES and job_state in not_requeued
