"""Finds the rank that failed first; the others ended because of it. Runs in the first node's agent.

Two controllers act when a rank dies (docs/explanation/architecture.md says why there are two):

- torchrun, on each node, restarts the round's ranks at once, as often as necessary (--max-restarts=1000000). It knows
  no steps, failure limits or silent nodes. It does not wait for the coordinator: most runs go on, and the restarted
  ranks often train already when the coordinator decides.
- The coordinator (jobs.control.coordinator) decides whether the run goes on, and on which nodes. It never restarts
  ranks in a round: it ends the attempt, announces another round, or has hung ranks killed for torchrun to restart.

So for one failure the coordinator sees several ended ranks, on several nodes, reported in any order. This module finds
the rank that failed, once every node has reported, and ignores the consequences of earlier failures.
"""

import time
from collections.abc import Sequence
from math import inf

from hpc.base.text import rank_names
from hpc.run.causes import Cause, is_consequence, may_have_waited
from hpc.run.events.kinds import RankFailed
from hpc.run.restart_budget import rank_signature
from jobs.control.rank_starts import describe_ended

# Long enough for all agents to report ranks that ended together.
_SETTLE_SECONDS = 1.0
# Nodes start the ranks of a round at almost the same time, and restart them 3 s later at the earliest
# (training.runtime.node_rendezvous).
_TOGETHER_SECONDS = 2.0
# Within this time, each agent that is not lost has got the directive and killed its ranks.
_ABORT_SECONDS = 15.0


class RootFailure:
    """Finds the rank that failed first, once for each interruption."""

    def __init__(self) -> None:
        self.explained_until = 0.0
        """Ranks started before this time (seconds since the epoch) ended because of an interruption already known."""
        self.aborted_at = -inf
        """Time at which the coordinator last had all ranks aborted (seconds since the epoch)."""
        self._bad_round = 0
        """The last round with a bad node, on which restarted ranks fail again until the next round leaves it out."""
        self._handled: set[RankFailed] = set()
        self._settling_since: float | None = None

    @property
    def is_settling(self) -> bool:
        """Whether ranks have failed and the failure that must be handled is not known yet."""
        return self._settling_since is not None

    def find(self, reported: set[RankFailed], *, all_heard: bool) -> RankFailed | None:
        """Return the failure that the coordinator must handle now; None if there is none, or agents have yet to report.

        `all_heard` is whether all members have just reported: a silent one may have died and made the others fail.
        """
        unhandled = reported - self._handled
        aborted = [failure.started_at for failure in reported if self._is_aborted(failure)]
        new = {each for each in unhandled if each.started_at > self.explained_until and each.round > self._bad_round}
        roots = {failure for failure in new if not self._is_aborted(failure) and not _has_lost(aborted, failure)}
        self._handled |= unhandled - roots
        if not roots:
            self._settling_since = None
            return None
        self._settling_since = self._settling_since or time.monotonic()
        if time.monotonic() - self._settling_since < _SETTLE_SECONDS or not all_heard:
            return None
        self._settling_since = None
        # When a node fails the preflight, ranks on the other nodes exit too, perhaps earlier; the bad node is the
        # cause all the same.
        root = min(roots, key=_priority)
        # Restarted ranks may have failed meanwhile: their failure is the next one.
        self.explained_until = max(root.failed_at, root.started_at + _TOGETHER_SECONDS)
        self._handled |= {failure for failure in unhandled if failure.started_at <= self.explained_until}
        if root.cause == Cause.BAD_NODE:
            self._bad_round = root.round
        return root

    def _is_aborted(self, failure: RankFailed) -> bool:
        # The directive to abort may arrive when torchrun has already restarted the ranks.
        return failure.signal == "SIGABRT" and 0.0 <= failure.failed_at - self.aborted_at < _ABORT_SECONDS


def _priority(failure: RankFailed) -> tuple[bool, bool, float]:
    # A rank that failed by itself comes before ranks whose last log line reports a lost peer.
    return failure.cause != Cause.BAD_NODE, is_consequence(failure.detail), failure.failed_at


def explain(failure: RankFailed, ended: Sequence[int]) -> tuple[str, str | None]:
    """Return a rank's failure in words, and its signature (hpc.run.restart_budget).

    `ended` are the ranks that had started together with it and have ended with exit code 0.
    """
    name = f"rank {failure.rank} on {failure.node}"
    code = f"signal {failure.signal}" if failure.signal else f"exit code {failure.exit_code}"
    how = code + (f": {failure.detail}" if failure.detail else "")
    if ended and failure.cause == Cause.CRASHED and may_have_waited(failure.detail):
        wait = f"{name} failed while it waited for {rank_names(ended)}, which had ended with exit code 0"
        return f"{wait}: give every rank the same number of steps ({how})", "waited for a rank that had ended"
    signature = rank_signature(failure.cause, failure.signal, failure.exit_code, failure.detail, failure.step)
    return f"{name}: {how}" + describe_ended(ended), signature


def _has_lost(aborted: list[float], failure: RankFailed) -> bool:
    """Return whether a rank failed because it lost an aborted peer that was started together with it."""
    together = any(abs(failure.started_at - started_at) < _TOGETHER_SECONDS for started_at in aborted)
    return together and is_consequence(failure.detail)
