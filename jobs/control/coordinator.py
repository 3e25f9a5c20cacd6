"""Decides for the whole attempt which nodes are lost, what failed, who trains, and when the attempt is over.

Runs in the first node's agent. It checks the statuses of all agents a few times a second. It waits for nothing but, for
a few seconds, for shared storage: if that hangs, the coordinator decides with what it read last.

A failure is a failed rank, a lost node, or a hang. It is recorded as `interruption` if the attempt goes on, and as the
cause in `attempt_ended` if not.
"""

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from hpc.base.kernel import steady_time
from hpc.base.text import few, rank_names
from hpc.run.budget import PastInterruption, signature_of
from hpc.run.causes import Cause
from hpc.run.events.attempts import attempts_of, budget_of
from hpc.run.events.history import History
from hpc.run.events.kinds import (
    Checked,
    Interrupted,
    NodeLost,
    NodeReturned,
    RanksEnded,
    RanksSilent,
    RoundStarted,
    SlowRank,
    TrainStarted,
)  # fmt: skip
from hpc.run.events.resumption import is_cancelled_now
from hpc.slurm import handover
from jobs.control.channel import LOST_SECONDS, ControlServer
from jobs.control.counted_steps import CountedSteps
from jobs.control.messages import OVER, Directive, NodeStatus, Phase, RankHeartbeat, RankStart
from jobs.control.rank_health import COUNTED, StragglerDetector, describe_silence, find_hang, is_silent
from jobs.control.rank_starts import RankStarts, describe_ended, ended_ranks
from jobs.control.root_failure import RootFailure, explain
from jobs.control.round_members import ABLE, MembershipView, decide_round
from jobs.control.silent_nodes import LINK_SECONDS, Patience
from jobs.node_attempt import NodeAttempt, log
from jobs.senders import start_notifying
from jobs.stop_request import StopRequest

# A node that has reported within this time counts as alive.
_FRESH_SECONDS = 0.9
# Agents that have lost contact with this one may have ended the attempt. Not every poll checks this, because the check
# reads shared storage.
_END_CHECK_SECONDS = 5.0
# Agents report the failures of their ranks within this time after the end of a torchrun.
_ROOT_SECONDS = 10.0
# A failure that is older than this does not explain a lack of nodes now.
_RECENT_SECONDS = LINK_SECONDS + 60.0
# Only rounds in which torchrun fails sooner than this count as failed rounds.
_SHORT_SECONDS = 120.0
# The nodes of a job are usually ready within this time of each other.
_SPARES_SECONDS = 2.0
# A check of the nodes takes seconds; the import of torch from slow storage may take a minute.
_SPARES_CHECK_SECONDS = 180.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure that interrupted the training or ended the attempt."""

    cause: Cause
    failed_at: float
    noticed_at: float
    """Time at which the coordinator noticed the failure. Both times are in seconds since the epoch."""
    step: int | None
    """The last step that any rank had done; None if unknown, as in a user's script that reports no steps."""
    detail: str
    signature: str | None = None
    """Text by which the same failure is recognized (hpc.run.budget)."""
    rank: int | None = None
    node: str | None = None
    counted_steps: int | None = None
    """The steps that a script which reports none had done since its ranks started."""


class Coordinator:
    """Decides for all agents of an attempt what failed, who trains, and when it is over."""

    def __init__(self, node: NodeAttempt, server: ControlServer, stop: StopRequest) -> None:
        self._node, self._server, self._stop = node, server, stop
        self.failure: Failure | None = None
        """Failure that ended the attempt; None if the attempt ended well, or was asked to stop."""
        self.done = False
        """Whether every member's torchrun has ended with 0."""
        self.lost: dict[int, float] = {}
        """Time at which each silent node was last heard, in seconds since the epoch, by node rank."""
        self.bad_nodes: set[int] = set()
        """Node ranks that failed the preflight, whose storage or device hangs, or that were evicted."""
        self.stuck: set[int] = set()
        """The `bad_nodes` with an unkillable rank: for a long time Slurm cannot end or requeue the job there."""
        self.last_step = 0
        """The last step that any rank has done since the last interruption."""
        self.counted = CountedSteps()
        """The steps that the ranks of a script have counted since the last interruption."""
        self._began = self._announced = self._end_checked = time.monotonic()
        self._failed_rounds = 0
        self._patience = Patience(node)
        self._root_failure, self._stragglers, self._is_silent = RootFailure(), StragglerDetector(), False
        self._starts = RankStarts()
        self._last_failure: Failure | None = None
        self._interruptions = list[PastInterruption]()
        self._paused_until = 0.0
        self._stopped_since: float | None = None
        self._enough_since: float | None = None
        self._read_history = node.history()
        self._preflight_passed = {name for event in self._read_history.of(Checked) for name in event.nodes}

    @property
    def signal(self) -> str | None:
        """The signal that asked the run to stop, on this node or another one; None if there was none."""
        others = (status.signal for status in self._server.statuses().values() if status.signal)
        return self._stop.name or next(others, None)

    @property
    def _world_size(self) -> int:
        """The number of ranks of the current round."""
        return len(self._server.directive.members) * self._node.spec.resources.ranks_per_node

    def poll(self) -> None:
        """Check all statuses once: handle failures, then choose the members of the round or end the attempt."""
        if self._server.directive.over:
            return
        self._leave_out_failed_spares()
        self._find_lost_nodes()
        directive, statuses = self._server.directive, self._server.statuses()
        self.bad_nodes |= {node_rank for node_rank, status in statuses.items() if status.phase is Phase.BAD_NODE}
        present = statuses.keys() - self.lost.keys()
        members = [statuses[node_rank] for node_rank in directive.members if node_rank in present]
        current = [status for status in members if status.round == directive.round]
        heartbeats = {heartbeat.rank: heartbeat for status in current for heartbeat in status.heartbeats}
        reported = [heartbeat.step for heartbeat in heartbeats.values() if heartbeat.phase != COUNTED]
        self.last_step = max([self.last_step, *reported])
        starts = [start for status in current for start in status.starts]
        self._count_steps(heartbeats, starts)
        self._find_failed_ranks()
        self._abort_hung_ranks(heartbeats)
        self._report_starts(starts)
        self._report_stragglers(heartbeats)
        self._report_silence(heartbeats)
        directive = self._server.directive
        # With the next round, a failure that is not handled yet would count as a known one. In a pause it is known, and
        # also if a member has ended its ranks because its link to this node was lost: the other ranks failed for that.
        has_left = any(status.phase is Phase.READY for status in current)
        is_known = self._stop or directive.paused or has_left or not self._root_failure.is_settling
        if not directive.over and is_known:
            self._choose_members()

    # --- what failed ---

    def _leave_out_failed_spares(self) -> None:
        """If a preflight with spares fails or lasts too long, check the other nodes alone.

        No run may fail, and no other node may be blamed, because of a spare. A spare that has not passed is checked
        when it is needed.
        """
        directive, statuses = self._server.directive, self._server.statuses()
        needed = directive.members[: self._node.spec.resources.nodes.most]
        if not directive.preflight or needed == directive.members or self._stop:
            return
        members = [statuses[node_rank] for node_rank in directive.members]
        current = [status for status in members if status.round == directive.round]
        if (
            any(self._server.is_silent(node_rank) for node_rank in directive.members)
            or any(status.phase not in ABLE for status in members)
            or any(status.phase is Phase.READY or status.exit_code or status.failures for status in current)
            or time.monotonic() - self._announced > _SPARES_CHECK_SECONDS
        ):
            log("the check of the nodes with the spares failed: the nodes are checked again without the spares")
            self._announce_round(needed, statuses)

    def _find_lost_nodes(self) -> None:
        """Record nodes that have fallen silent or are back. Members that fall silent together count as one failure."""
        for node_rank in [node_rank for node_rank in self.lost if not self._server.is_silent(node_rank)]:
            del self.lost[node_rank]
            self._node.record(NodeReturned(node=self._name(node_rank)))
            log(f"{self._name(node_rank)} is back")
        lost_members = list[str]()
        for node_rank, status in self._server.statuses().items():
            known = node_rank in self.lost or node_rank == self._node.allocation.node_rank
            if known or status.phase in OVER or not self._server.is_silent(node_rank):
                continue
            last_heard = steady_time() - (self._server.silent_seconds(node_rank) or 0.0)
            self.lost[node_rank] = last_heard
            name = self._name(node_rank)
            self._node.record(NodeLost(node=name, last_heard=last_heard, detail=f"lost contact with {name}"))
            if node_rank in self._server.directive.members and not self._server.directive.paused:
                lost_members.append(name)
        # Agents that are asked to stop leave before this one ends the attempt, so they must know the saver by then.
        saver = next((rank for rank in self._server.directive.members if rank not in self.lost), None)
        if saver not in {None, self._server.directive.saver}:
            self._direct(saver=saver)
        if lost_members:
            first = len(lost_members) == len(self.lost)
            # `lost` keeps nodes that were lost earlier; a node lost only now fell silent about LOST_SECONDS ago.
            failed_at = min(self.lost.values()) if first else steady_time() - LOST_SECONDS
            detail = f"lost contact with {few(lost_members)}"
            self._handle(self._failure(Cause.NODE_FAILURE, failed_at, detail, node=lost_members[0]))

    def _find_failed_ranks(self) -> None:
        if self._server.directive.paused:
            return  # the agents are killing the ranks: some fail first, because they lose their peers
        statuses = self._server.statuses().values()
        reported = {each for status in statuses for each in status.failures}
        root = self._root_failure.find(reported, all_heard=self._all_heard())
        if root is None:
            return
        if root.cause == Cause.BAD_NODE:
            hostnames = self._node.allocation.hostnames
            self.bad_nodes |= {node_rank for node_rank, name in enumerate(hostnames) if name == root.node}
        detail, signature = explain(root, self._ended_ranks(root.round, root.restarts))
        failure = self._failure(
            Cause(root.cause), root.failed_at, detail, rank=root.rank, node=root.node, signature=signature
        )
        # Use the failed rank's own step, not the last step of all ranks: the same failure happens at the same step,
        # whether the other ranks finish that step or not.
        known = failure.step is not None and root.step is not None
        counted = failure.counted_steps and max(failure.counted_steps, root.counted_steps or 0)
        failure = replace(failure, step=root.step if known else failure.step, counted_steps=counted)
        self._handle(failure, restarts=root.restarts)

    def _ended_ranks(self, number: int, restarts: int) -> tuple[int, ...]:
        """Return the ranks of a round that had started after a number of restarts and have ended with exit code 0."""
        statuses = [status for status in self._server.statuses().values() if status.round == number]
        return ended_ranks([start for status in statuses for start in status.starts], restarts)

    def _all_heard(self) -> bool:
        """Return whether every other member that takes part and is not lost has just reported."""
        own, statuses = self._node.allocation.node_rank, self._server.statuses()
        over = {node_rank for node_rank, status in statuses.items() if status.phase in OVER}
        others = set(self._server.directive.members) - {own} - self.lost.keys() - over
        return all((self._server.silent_seconds(node_rank) or 0.0) < _FRESH_SECONDS for node_rank in others)

    def _abort_hung_ranks(self, heartbeats: dict[int, RankHeartbeat]) -> None:
        """Have all ranks killed if some hang. torchrun restarts them, except on a node where they cannot be killed."""
        if self.lost.keys() & set(self._server.directive.members) or not self._all_heard():
            return  # the ranks wait for a node that is or may be dead
        hang = find_hang(heartbeats, self._node.spec.recovery.hang_timeout.typed)
        if hang is None or self._stop:
            return
        # A hang that began before the last interruption belongs to it: those ranks are being killed and restarted.
        if self._root_failure.explained_until > steady_time() - hang.seconds:
            return
        nodes = {node for rank in hang.unkillable if (node := self._node_of(rank)) is not None}
        # If several nodes are stuck, the cause is the storage that they share.
        stuck = nodes if len(nodes) == 1 else set[int]()
        self.stuck |= stuck
        self.bad_nodes |= stuck
        self._direct(abort_count=self._server.directive.abort_count + 1)
        cause, name = Cause.BAD_NODE if stuck else Cause.HANG, next(map(self._name, stuck), None)
        # The same hang happens at the same step. If the program promises no steps, only heartbeats show the step.
        step = self.last_step or self.counted.done or 0
        signature = None if stuck else "" if self._node.spec.program.reports_steps else f"after step {step}"
        since = steady_time() - hang.seconds
        detail = hang.detail + describe_ended(self._starts.ended)
        self._handle(self._failure(cause, since, detail, rank=hang.rank, node=name, signature=signature))
        # All ranks started until now are killed, so their failures are explained.
        self._root_failure.explained_until = self._root_failure.aborted_at = steady_time()

    def _failure(self, cause: Cause, failed_at: float, detail: str, **fields: Any) -> Failure:
        program, attempt = self._node.spec.program, self._node.attempt.attempt
        knows_steps = program.reports_steps or self._history().during(attempt).knows_steps
        step = self.last_step if knows_steps else None
        return Failure(
            cause=cause, failed_at=failed_at, noticed_at=steady_time(), step=step, detail=detail,
            counted_steps=None if knows_steps else self.counted.done, **fields,
        )  # fmt: skip

    def _handle(self, failure: Failure, restarts: int | None = None) -> None:
        """Record a failure as interruption; end the attempt instead if the run may not restart, or others ended it.

        If torchrun restarts the ranks, `restarts` says after how many restarts the failed ones had started.
        """
        if self._node.storage.ask(self._has_ended, otherwise=False):
            self._end()
            return
        self._last_failure, self.last_step = failure, 0
        self.counted.restart(restarts)
        self._root_failure.explained_until = max(self._root_failure.explained_until, failure.failed_at)
        # Take the interruptions of this attempt from memory: because of a full disk they may not be recorded.
        *earlier, this = attempts_of(
            each
            for each in self._history().events
            # Leave out the starts of ranks that have already replaced the failed ones.
            if not isinstance(each, TrainStarted) or each.time < failure.failed_at
        )
        self._interruptions.append(
            this.interrupted_by(failure.cause, failure.step, failure.signature, failure.failed_at)
        )
        budget = budget_of([*earlier, replace(this, interruptions=tuple(self._interruptions))])
        if not budget.may_restart:
            self._end(failure)
            return
        pause = budget.pause_seconds
        event = Interrupted(round=self._server.directive.round, pause_seconds=pause, **asdict(failure))
        self._node.record(event)
        log(f"{failure.cause}: {failure.detail}")
        start_notifying(self._node)
        if pause:
            self._paused_until = time.monotonic() + pause
            self._direct(paused=True)
            log(f"{budget.failures} failures without progress: the ranks start again in {pause:.0f} s")

    def _count_steps(self, heartbeats: dict[int, RankHeartbeat], starts: list[RankStart]) -> None:
        """Note how many steps the ranks of a script have done, and record it for `hpc status`."""
        if first_step := self.counted.update(heartbeats.values(), starts, self._world_size):
            self._node.record(first_step)
        if record := self.counted.to_record():
            self._node.storage.ask(partial(self._node.show_steps, record), otherwise=None)

    def _report_starts(self, starts: list[RankStart]) -> None:
        """Record that all ranks of the round have started, and that some have ended while the others run."""
        directive = self._server.directive
        if directive.preflight or directive.paused or self._stop or self._root_failure.is_settling:
            return
        event = self._starts.find(directive.round, self._world_size, starts) if directive.members else None
        if event is not None:
            self._node.record(event)
        if isinstance(event, RanksEnded):
            log(f"{rank_names(event.ranks)} ended with exit code 0, and the other ranks still run")

    def _report_stragglers(self, heartbeats: dict[int, RankHeartbeat]) -> None:
        for found in self._stragglers.find(heartbeats):
            of_rank = self._node_of(found.rank)
            node = "its node" if of_rank is None else self._name(of_rank)
            event = SlowRank(
                rank=found.rank, node=node, busy_seconds=found.busy_seconds, median_seconds=found.usual_seconds
            )
            self._node.record(event)
            log(
                f"rank {found.rank} on {node} slows the others down: it works {found.busy_seconds:.3f} s per step, "
                f"the others {found.usual_seconds:.3f} s"
            )
            if of_rank is not None and self._node.spec.recovery.evict_slow:
                self._evict(of_rank)

    def _evict(self, node_rank: int) -> None:
        """Continue without a slow node, if a spare node is ready. The next jobs avoid the slow one."""
        if self._spares(self._server.directive.members):
            self.bad_nodes.add(node_rank)
            log(f"a spare node takes the place of {self._name(node_rank)}")

    def _spares(self, members: tuple[int, ...]) -> list[int]:
        """Return the node ranks of the nodes that could train, but are not members."""
        able = {rank for rank, status in self._server.statuses().items() if status.phase in ABLE}
        return sorted(able - {*members, *self.lost, *self.bad_nodes})

    def _must_check(self, members: tuple[int, ...]) -> bool:
        """Return whether the next round of these members is a preflight."""
        checked = self._preflight_passed.issuperset(map(self._name, members))
        return self._node.spec.program.preflight is not None and not checked

    def _awaits_spares(self, members: tuple[int, ...], view: MembershipView) -> bool:
        """Return whether the first round waits a moment for spares, because it is a preflight."""
        if self._server.directive.round > 0 or not view.num_pending or not self._must_check(members):
            return False
        self._enough_since = self._enough_since or time.monotonic()
        return time.monotonic() - self._enough_since < _SPARES_SECONDS

    def _report_silence(self, heartbeats: dict[int, RankHeartbeat]) -> None:
        """Report that the ranks of a script without heartbeats do nothing, and that they do something again."""
        if heartbeats and is_silent(heartbeats) != self._is_silent:
            self._is_silent = not self._is_silent
            seconds = min(each.still_seconds for each in heartbeats.values())
            self._node.record(RanksSilent(seconds=seconds if self._is_silent else 0.0))
            if self._is_silent:
                log(describe_silence(seconds))

    def _node_of(self, rank: int) -> int | None:
        """Return the node rank of the node that runs a rank; None if unknown. Lost nodes' old statuses are skipped."""
        present = [(node, status) for node, status in self._server.statuses().items() if node not in self.lost]
        return next((node for node, status in present for each in status.heartbeats if each.rank == rank), None)

    def _name(self, node_rank: int) -> str:
        return self._node.allocation.hostnames[node_rank]

    # --- who trains ---

    def _choose_members(self) -> None:
        """Announce another round or a pause, or end the attempt, if the states of the nodes require it."""
        directive, statuses = self._server.directive, self._server.statuses()
        if self._is_over_for_others():
            self._end()
            return
        if self._stop:
            left = statuses.keys() - self.lost.keys()
            if not any(statuses[node_rank].phase is Phase.RUNNING for node_rank in left):
                self._end()
            return
        if self._node.attempt.start_once and directive.members and not directive.preflight:
            self._end_only_round(directive, statuses)
            return
        view = MembershipView(
            num_nodes=self._node.allocation.num_nodes,
            min_nodes=self._node.spec.fewest_to_continue,
            max_nodes=self._node.spec.resources.nodes.most,
            statuses=statuses,
            excluded=frozenset({*self.lost, *self.bad_nodes}),
            awaited=self._awaited(),
            waited_seconds=time.monotonic() - self._began,
            failed_rounds=self._failed_rounds,
        )
        decision = decide_round(directive, view)
        if decision.failed:
            self._end(self._failure_of_membership(decision.failed, statuses))
        elif decision.done and directive.preflight:
            names = [self._name(node_rank) for node_rank in directive.members]
            self._preflight_passed.update(names)
            self._node.record(Checked(nodes=tuple(names)))
            self._announce_round(directive.members[: view.max_nodes], statuses)
        elif decision.done:
            self._end(done=True)
        elif (
            decision.members
            and time.monotonic() >= self._paused_until
            and not self._awaits_spares(decision.members, view)
        ):
            self._announce_round(decision.members, statuses)
        elif decision.wait:
            self._direct(paused=True)

    def _end_only_round(self, directive: Directive, statuses: dict[int, NodeStatus]) -> None:
        """With --start-once, end the attempt when its only round has ended: no other round may start the ranks."""
        members = [statuses[node_rank] for node_rank in directive.members]
        current = [status for status in members if status.round == directive.round]
        ended = [status for status in current if status.phase is Phase.ENDED]
        if any(status.exit_code for status in ended) or any(status.phase is Phase.READY for status in current):
            # The rank that failed becomes known within seconds, and ends the attempt (`_find_failed_ranks`).
            self._stopped_since = self._stopped_since or time.monotonic()
            if time.monotonic() - self._stopped_since > _ROOT_SECONDS:
                self._end(self._failure_of_membership("torchrun failed: see hpc logs --all", statuses))
        elif len(ended) == len(members):
            self._end(done=True)

    def _awaited(self) -> frozenset[int]:
        """Return the node ranks of lost nodes whose link may come back."""
        server, lost = self._server, self.lost.keys() - self.bad_nodes
        silent = {rank: server.silent_seconds(rank) or 0.0 for rank in lost if not server.has_ended(rank)}
        recent = [rank for rank, seconds in silent.items() if seconds < LINK_SECONDS]
        limit = self._patience.seconds([self._name(rank) for rank in recent]) if recent else 0.0
        return frozenset(rank for rank in recent if silent[rank] < limit)

    def _is_over_for_others(self) -> bool:
        """Return whether other agents have ended the attempt. If the user has cancelled the run, make all agents stop.

        Checks every _END_CHECK_SECONDS, and returns False in between.
        """
        if time.monotonic() - self._end_checked < _END_CHECK_SECONDS:
            return False
        self._end_checked = time.monotonic()
        cancelled, ended = self._node.storage.ask(
            lambda: (is_cancelled_now(self._node.run), self._has_ended()), otherwise=(False, False)
        )
        if cancelled:
            # Make the agents stop as if the SIGTERM of scancel had reached them already. Ending the attempt here would
            # kill ranks that save.
            self._direct(stop=True)
        return ended

    def _has_ended(self) -> bool:
        return handover.has_ended(self._node.run, self._node.attempt.attempt)

    def _history(self) -> History:
        """Read the history of the run. If the storage hangs, return the history that was read last."""
        self._read_history = self._node.storage.ask(self._node.history, otherwise=self._read_history)
        return self._read_history

    def _announce_round(self, members: tuple[int, ...], statuses: dict[int, NodeStatus]) -> None:
        before = self._server.directive
        reported = [statuses[node_rank] for node_rank in before.members]
        failed = any(status.exit_code and status.round == before.round for status in reported)
        short = time.monotonic() - self._announced < _SHORT_SECONDS
        self._failed_rounds = self._failed_rounds + 1 if failed and short else 0
        self._announced = time.monotonic()
        number, port, preflight = before.round + 1, statuses[members[0]].port, self._must_check(members)
        self._node.record(RoundStarted(round=number, port=port, members=members))
        if preflight and before.round == 0:
            # A spare that is checked now can replace a lost node without another preflight.
            members = (*members, *self._spares(members))
        # The agents have killed the ranks of the last round, or kill them now, so their ends are not failures.
        self._root_failure.explained_until = steady_time()
        self.counted.restart()
        host = self._server.address(members[0])
        self._direct(
            round=number, members=members, saver=members[0], host=host, port=port, preflight=preflight, paused=False
        )

    def _failure_of_membership(self, reason: str, statuses: dict[int, NodeStatus]) -> Failure:
        """Return why too few nodes are left: the last failure if it is recent, or one that names the missing nodes."""
        out = {rank: status for rank, status in statuses.items() if status.phase in {Phase.FAILED, Phase.BAD_NODE}}
        failed = [f"{self._name(node_rank)}: {status.detail}" for node_rank, status in out.items()]
        failed += [f"lost contact with {few(list(map(self._name, sorted(self.lost))))}"] if self.lost else []
        last = self._last_failure
        if last and steady_time() - last.noticed_at < _RECENT_SECONDS and not out:
            return replace(last, detail=f"{last.detail}; {reason}")
        bad_nodes = [self._name(rank) for rank, status in out.items() if status.phase is Phase.BAD_NODE]
        own = next((status.cause for status in out.values()), Cause.CRASHED)
        cause = Cause.NODE_FAILURE if self.lost else Cause.BAD_NODE if bad_nodes else own
        at_fault = [*bad_nodes, *map(self._name, sorted(self.lost))]
        detail = "; ".join([*failed, reason])
        signature = signature_of(detail) if cause is Cause.CRASHED else None
        return self._failure(cause, steady_time(), detail, node=next(iter(at_fault), None), signature=signature)

    def _direct(self, **changes: Any) -> None:
        self._server.directive = replace(self._server.directive, **changes)

    def _end(self, failure: Failure | None = None, *, done: bool = False) -> None:
        self.failure, self.done = failure, done
        self._direct(over=True)
