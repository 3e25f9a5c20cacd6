"""Limits how often a run may fail without progress, and sets the pause before its ranks restart. Pure; runs everywhere.

A budget is such a limit for several causes. docs/explanation/recovery.md has a table of the budgets for users.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hpc.run.causes import Cause, JobState, is_consequence

# Causes that end a run without a failure.
FINAL_CAUSES = frozenset({Cause.COMPLETED, Cause.CANCELLED})
# Failures count as being at the same step if they are at most this many steps apart: ranks report the last step that
# they have finished, and a heartbeat is at most one step old.
_SAME_STEP = 2
# Least seconds from one start of the ranks to the next after the first, second, ... failure without progress.
# Otherwise, a transient fault of storage or a network would use up the budget: it lasts longer than a start.
_PAUSES_SECONDS = (0.0, 10.0, 30.0, 90.0)
# Ranks whose steps are unknown have made progress if they ran for longer than this. Ranks that hang from their start
# end earlier, because torch's own timeout of a collective is half an hour for gloo.
_LONG_SECONDS = 3600.0
_ENDED_FROM_OUTSIDE = frozenset({Cause.PREEMPTED, Cause.REQUEUED, Cause.TIME_LIMIT})


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """The budget that several causes share: the run fails once it has had `failures` failures without progress."""

    causes: frozenset[Cause]
    failures: int
    pauses: bool = False


# Causes without a rule, such as preemptions and requeues, come from outside the run and use no budget.
_RULES = (
    # Only a person can repair bad input or a full disk.
    _Rule(causes=frozenset({Cause.BAD_INPUT, Cause.NO_SPACE}), failures=1),
    # A true divergence recurs at the same step and ends the run. Otherwise, a device has probably computed wrongly
    # (training.engine.recomputation).
    _Rule(causes=frozenset({Cause.DIVERGED}), failures=3),
    _Rule(
        causes=frozenset({Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.HANG, Cause.TIME_LIMIT}),
        failures=5,
        pauses=True,
    ),
    # Each bad node is excluded from the next attempt; after five, the run itself is the likely cause.
    _Rule(causes=frozenset({Cause.BAD_NODE}), failures=5),
    # The nodes of a rack or a switch may fail one after the other, faster than a training starts. If a node dies before
    # the agents know each other, Slurm ends all of them, and the attempt is lost.
    _Rule(causes=frozenset({Cause.NODE_FAILURE, Cause.LOST}), failures=10),
)


def _rule(cause: str | None) -> _Rule | None:
    return next((rule for rule in _RULES if cause in rule.causes), None)


@dataclass(frozen=True, kw_only=True)
class PastInterruption:
    """An interruption or the end of an attempt, as the budgets count it."""

    cause: str
    step: int | None = None
    """The last finished step; None if unknown."""
    restored_step: int | None = None
    """The step from which the interrupted ranks had started; None if they had recorded no start."""
    signature: str | None = None
    """A text that all repetitions of a failure share; None if failures that look alike may have different causes."""
    ran_seconds: float = 0.0
    """Seconds for which the interrupted ranks had run."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much of its failure limits a run has used, as of its last interruption."""

    cause: str | None = None
    """The cause of the last interruption; None before the first."""
    row: tuple[str, ...] = ()
    """The causes of the failures since the last progress, the newest last."""
    start_once: bool = False
    """Whether no interruption may be followed by a restart (--start-once)."""
    ran_seconds: float = 0.0
    """Seconds for which the ranks had run before the last interruption."""
    is_repeated: bool = False
    """Whether the last failure repeats the failure before it. If so, the run fails, even within its budget."""

    @property
    def failures(self) -> int:
        """The number of failures since the last progress that share the last cause's limit; 0 if it has no limit."""
        rule = _rule(self.cause)
        return sum(cause in rule.causes for cause in self.row) if rule else 0

    @property
    def may_restart(self) -> bool:
        """Whether the run may restart after the last interruption."""
        rule = _rule(self.cause)
        used_up = rule is not None and self.failures >= rule.failures
        return not self.start_once and self.cause not in FINAL_CAUSES and not used_up and not self.is_repeated

    @property
    def pause_seconds(self) -> float:
        """Seconds for which the ranks wait before they start again."""
        rule = _rule(self.cause)
        if rule is None or not rule.pauses:
            return 0.0
        least = _PAUSES_SECONDS[min(max(self.failures, 1), len(_PAUSES_SECONDS)) - 1]
        return max(least - self.ran_seconds, 0.0)

    @property
    def used(self) -> list[str]:
        """A line for each limit that has counted failures, with the number at which the run fails."""
        counted = [(rule, [cause for cause in self.row if cause in rule.causes]) for rule in _RULES]
        lines = [
            f"failures without progress: {len(own)} of {rule.failures} ({', '.join(dict.fromkeys(own))})"
            for rule, own in counted
            if own
        ]
        return [*lines, "the same failure twice in a row has ended the run"] if self.is_repeated else lines


def budget_after(history: Iterable[PastInterruption]) -> Budget:
    """Return the budget of a run after its interruptions and ends of attempts, which are in order.

    Ranks that start from a later step than the ranks before them show progress; steps that were done but lost do not
    count. Ranks whose steps are unknown have made progress if they were ended from outside, or ran for over an hour. A
    time limit is a failure only if its attempt did no step, for example because staging takes longer than the limit.
    """
    budget, before, restored = Budget(), None, 0
    for past in history:
        rule, row = _rule(past.cause), budget.row
        trained = past.restored_step is not None and (past.step or 0) > past.restored_step
        if past.restored_step is not None:
            row, restored = (() if past.restored_step > restored else row), past.restored_step
        if past.step is None and past.cause in _ENDED_FROM_OUTSIDE:
            rule, row = None, ()
        elif past.step is None and past.ran_seconds > _LONG_SECONDS:
            row, before = (), None
        if rule is None or (past.cause == Cause.TIME_LIMIT and trained):
            budget = Budget(cause=past.cause, row=row)
            continue
        repeated = before is not None and _is_same(before, past)
        budget = Budget(cause=past.cause, row=(*row, past.cause), ran_seconds=past.ran_seconds, is_repeated=repeated)
        before = past
    return budget


def _is_same(first: PastInterruption, second: PastInterruption) -> bool:
    """Return whether two failures have the same cause and signature and, if both steps are known, the same step."""
    # Time limits have no signature, but are the same failure: they count only if their attempts did no step.
    is_comparable = first.signature is not None or first.cause == Cause.TIME_LIMIT
    if not is_comparable or (first.cause, first.signature) != (second.cause, second.signature):
        return False
    return first.step is None or second.step is None or abs(first.step - second.step) <= _SAME_STEP


def signature_of(message: str) -> str:
    """Return a message without its numbers and addresses, which change from one failure to the next."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", message)


def rank_signature(cause: str, signal: str | None, exit_code: int, detail: str, step: int | None) -> str | None:
    """Return the signature of a rank's failure; None if failures that look alike may have different causes.

    A message about a lost peer has no signature, because it does not say why the peer died. A SIGKILL has one only if
    memory ran out: any other SIGKILL comes from outside, where somebody may kill one rank after the other. Another
    signal, or a bad node, has a signature only if the step is known.
    """
    killed = signal == "SIGKILL" and cause != Cause.OUT_OF_MEMORY
    if is_consequence(detail) or killed or (step is None and (signal is not None or cause == Cause.BAD_NODE)):
        return None
    return f"{signal or exit_code}: {signature_of(detail)}"


def must_requeue(cause: Cause, job_state: JobState, *, may_restart: bool) -> bool:
    """Return whether an agent must ask Slurm to requeue the job: the run may restart, and Slurm would not requeue it.

    Slurm itself requeues a job that lost a node, and a job that somebody else has requeued is already pending. Slurm
    does not requeue a job that still runs, has reached its time limit or lost its batch script, or that it preempts
    with PreemptMode=CANCEL.
    """
    not_requeued = {JobState.RUNNING, JobState.TIMEOUT, JobState.FAILED, JobState.UNKNOWN}
    if cause is Cause.PREEMPTED:
        not_requeued |= {JobState.CANCELLED, JobState.PREEMPTED}
    return may_restart and cause not in FINAL_CAUSES and job_state in not_requeued
