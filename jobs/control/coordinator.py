"""Decides for the whole attempt which nodes are lost, what failed, who trains, and when the attempt is over.

Runs in the first node's agent. It checks the statuses of all agents a few times a second, and waits for nothing: what
it reads from shared storage, and writes there, a thread reads and writes. If the storage hangs, the coordinator decides
with what was read last.

A failure is a failed rank, a lost node, or a hang. It is recorded as `interruption` if the attempt goes on, and as the
cause in `attempt_ended` if not.
"""

import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from hpc.base.kernel import steady_time
from hpc.base.text import few, rank_names
from hpc.run.causes import Cause
from hpc.run.events.history import History
from hpc.run.events.kinds import (
    Checked,
    Event,
    Interrupted,
    NodeLost,
    NodeReturned,
    RanksEnded,
    RanksSilent,
    RoundStarted,
)  # fmt: skip
from hpc.run.events.resumption import is_cancelled_now
from hpc.run.restart_budget import PastInterruption
from hpc.slurm import handover
from jobs.control.attempt_view import AttemptView
from jobs.control.channel import LOST_SECONDS, ControlServer
from jobs.control.counted_steps import CountedSteps
from jobs.control.failures import budget_with, lack_of_nodes, with_known_steps
from jobs.control.messages import OVER, Phase
from jobs.control.rank_health import COUNTED, StragglerDetector, describe_silence, find_hang, is_silent
from jobs.control.rank_starts import RankStarts, describe_ended
from jobs.control.root_failure import RootFailure, explain
from jobs.control.round_members import decide_round
from jobs.control.silent_nodes import LINK_SECONDS, Patience
from jobs.node_attempt import HANGS_SECONDS, NodeAttempt, log
from jobs.stop_request import StopRequest

# A node that has reported within this time counts as alive.
_FRESH_SECONDS = 0.9
# Agents that have lost contact with this one may have ended the attempt. Not every poll asks the storage for that.
_END_CHECK_SECONDS = 5.0
# Servers that fail over may answer wrongly for seconds.
_GONE_CHECKS = 4
# Agents report the failures of their ranks within this time after the end of a torchrun.
_ROOT_SECONDS = 10.0
# Only rounds in which torchrun fails sooner than this count as failed rounds.
_SHORT_SECONDS = 120.0
# The nodes of a job are usually ready within this time of each other.
_SPARES_SECONDS = 2.0
# A check of the nodes takes seconds; the import of torch from slow storage may take a minute.
_SPARES_CHECK_SECONDS = 180.0


class Coordinator:
    """Decides for all agents of an attempt what failed, who trains, and when it is over."""

    def __init__(self, node: NodeAttempt, server: ControlServer, stop: StopRequest) -> None:
        self._node, self._server, self._stop = node, server, stop
        self.failure: Interrupted | None = None
        """Interrupted that ended the attempt; None if the attempt ended well, or was asked to stop."""
        self.done = False
        """Whether every member's torchrun has ended with 0."""
        self.run_is_gone = False
        """Whether the run directory was deleted, moved or replaced. The attempt then ends, and writes nothing more."""
        self.lost: dict[int, float] = {}
        """Time at which each silent node was last heard, in seconds since the epoch, by node rank."""
        self.bad_nodes: set[int] = set()
        """Node ranks that failed the preflight, or whose storage or device hangs."""
        self.stuck: set[int] = set()
        """The `bad_nodes` with an unkillable rank: for a long time Slurm cannot end or requeue the job there."""
        self.last_step = 0
        """The last step that any rank has done since the last interruption."""
        self.counted = CountedSteps()
        """The steps that the ranks of a script have counted since their last start."""
        # What was read from the storage, and what is being read.
        self._history = node.history()
        self._unjudged = list[tuple[Interrupted, Future[History | None], float]]()
        """Failures, the histories that decide about them (None if other agents have ended the attempt), and when these
        were requested."""
        self._device = node.run.path.stat().st_dev
        self._gone_checks = 0
        self._end_check: Future[tuple[bool, bool, bool]] | None = None
        self._end_checked_at = time.monotonic()
        # What happened before.
        self._interruptions = list[PastInterruption]()
        self._last_failure: Interrupted | None = None
        self._failed_rounds = 0
        self._preflight_passed = {name for event in self._history.of(Checked) for name in event.nodes}
        # The state of what is watched.
        self._root_failure = RootFailure()
        self._stragglers = StragglerDetector()
        self._starts = RankStarts()
        self._patience = Patience(node)
        self._is_silent = False
        # Ranks that have hung since before this time are being replaced, in steady_time(). The loss of a node does not
        # count: if the node is back before the next round, its ranks go on, and so does their hang.
        self._replaced_until = 0.0
        # Since when something waits, in time.monotonic().
        self._began = time.monotonic()
        self._announced = self._began
        self._paused_until = 0.0
        self._stopped_since: float | None = None
        self._enough_since: float | None = None

    @property
    def signal(self) -> str | None:
        """The signal that asked the run to stop, on this node or another one; None if there was none."""
        others = (status.signal for status in self._server.statuses().values() if status.signal)
        return self._stop.name or next(others, None)

    def _view(self) -> AttemptView:
        return AttemptView(
            directive=self._server.directive,
            statuses=self._server.statuses(),
            hostnames=self._node.allocation.hostnames,
            lost=frozenset(self.lost),
            awaited=self._awaited(),
            bad_nodes=frozenset(self.bad_nodes),
            ranks_per_node=self._node.spec.resources.ranks_per_node,
            min_nodes=self._node.spec.fewest_to_continue,
            max_nodes=self._node.spec.resources.nodes.most,
            waited_seconds=time.monotonic() - self._began,
            failed_rounds=self._failed_rounds,
        )

    def poll(self) -> None:
        """Check all statuses once: handle failures, then choose the members of the round or end the attempt."""
        self._check_end()
        self._judge_failures()
        if self._server.directive.over:
            return
        self._leave_out_failed_spares(self._view())
        self._find_lost_nodes()
        view = self._view()
        self.bad_nodes |= {node_rank for node_rank, status in view.statuses.items() if status.phase is Phase.BAD_NODE}
        reported = [heartbeat.step for heartbeat in view.heartbeats.values() if heartbeat.phase != COUNTED]
        self.last_step = max([self.last_step, *reported])
        self._count_steps(view)
        self._find_failed_ranks(view)
        self._abort_hung_ranks(view)
        self._report_starts(view)
        self._report_stragglers(view)
        self._report_silence(view)
        # With the next round, a failure that is not handled yet would count as a known one. In a pause it is known, and
        # also if a member has ended its ranks because its link to this node was lost: the other ranks failed for that.
        is_known = self._stop or view.directive.paused or view.has_left or not self._root_failure.is_settling
        if not self._unjudged and is_known:
            self._choose_members(self._view())

    # --- what the coordinator does ---

    def _record(self, event: Event, text: str = "") -> None:
        self._node.record_later(event)
        if text:
            log(text)

    def _direct(self, **changes: Any) -> None:
        self._server.directive = replace(self._server.directive, **changes)

    def _end(self, failure: Interrupted | None = None, *, done: bool = False) -> None:
        self.failure = failure
        self.done = done
        self._direct(over=True)

    # --- what the storage says ---

    def _has_ended(self) -> bool:
        return handover.has_ended(self._node.run, self._node.attempt.attempt)

    def _ask_storage(self) -> tuple[bool, bool, bool]:
        """Return whether the run is cancelled, other agents have ended the attempt, and the run directory is gone."""
        if self._node.lacks_run(self._device):
            return False, False, True
        return is_cancelled_now(self._node.run), self._has_ended(), False

    def _check_end(self) -> None:
        """Every 5 s, find out whether others have ended the attempt, cancelled the run, or removed its directory."""
        if self._server.directive.over:
            return
        answer = self._end_check
        if answer is None:
            if time.monotonic() - self._end_checked_at >= _END_CHECK_SECONDS:
                self._end_checked_at = time.monotonic()
                self._end_check = self._node.storage.request(self._ask_storage)
            return
        if not answer.done():
            return
        self._end_check = None
        cancelled, ended, gone = (False, False, False) if answer.exception() else answer.result()
        self._gone_checks = self._gone_checks + 1 if gone else 0
        if self._gone_checks == _GONE_CHECKS:
            self.run_is_gone = True
            self._direct(saver=0)  # no other node must save its snapshot
            self._end()
        if cancelled:
            # Make the agents stop as if the SIGTERM of scancel had reached them already. Ending the attempt here would
            # kill ranks that save.
            self._direct(stop=True)
        if ended:
            self._end()

    def _notice(self, failure: Interrupted) -> None:
        """Have the history read that decides about a failure, whose ranks are being replaced from now on."""
        self.last_step = 0
        self._root_failure.explained_until = max(self._root_failure.explained_until, failure.failed_at or 0.0)
        read = self._node.storage.request(lambda: None if self._has_ended() else self._node.history())
        self._unjudged.append((failure, read, time.monotonic()))

    def _judge_failures(self) -> None:
        """Record noticed failures as interruptions; end the attempt if the run may not restart, or others ended it."""
        while self._unjudged and not self._server.directive.over:
            failure, read, requested_at = self._unjudged[0]
            if not read.done() and time.monotonic() - requested_at < HANGS_SECONDS:
                return
            del self._unjudged[0]
            if read.done() and read.exception() is None:
                history = read.result()
                if history is None:
                    self._end()
                    return
                self._history = history
            self._judge(failure)

    @property
    def _knows_steps(self) -> bool:
        attempt = self._node.attempt.attempt
        return self._node.spec.program.reports_steps or self._history.during(attempt).knows_steps

    def _judge(self, failure: Interrupted) -> None:
        failure = with_known_steps(failure, reports_steps=self._knows_steps)
        self._last_failure = failure
        interruption, budget = budget_with(failure, self._interruptions, self._history)
        self._interruptions.append(interruption)
        if not budget.may_restart:
            self._end(failure)
            return
        pause = budget.pause_seconds
        event = structs.replace(failure, round=self._server.directive.round, pause_seconds=pause)
        self._record(event, f"{failure.cause}: {failure.detail}")
        if pause:
            self._paused_until = time.monotonic() + pause
            self._direct(paused=True)
            log(f"{budget.failures} failures without progress: the ranks start again in {pause:.0f} s")

    # --- what failed ---

    def _leave_out_failed_spares(self, view: AttemptView) -> None:
        """If a preflight with spares fails or lasts too long, check the other nodes alone.

        No run may fail, and no other node may be blamed, because of a spare. A spare that has not passed is checked
        when it is needed.
        """
        members = view.directive.members
        needed = members[: view.max_nodes]
        if not view.directive.preflight or needed == members or self._stop:
            return
        lasts_too_long = time.monotonic() - self._announced > _SPARES_CHECK_SECONDS
        if lasts_too_long or view.has_spare_that_fails(filter(self._server.is_silent, members)):
            log("the check of the nodes with the spares failed: the nodes are checked again without the spares")
            self._announce_round(needed, view)

    def _find_lost_nodes(self) -> None:
        """Record nodes that have fallen silent or are back. Members that fall silent together count as one failure."""
        hostnames = self._node.allocation.hostnames
        for node_rank in [node_rank for node_rank in self.lost if not self._server.is_silent(node_rank)]:
            del self.lost[node_rank]
            self._record(NodeReturned(node=hostnames[node_rank]), f"{hostnames[node_rank]} is back")
        lost_members = list[str]()
        for node_rank, status in self._server.statuses().items():
            is_counted = node_rank in self.lost or node_rank == self._node.allocation.node_rank
            if is_counted or status.phase in OVER or not self._server.is_silent(node_rank):
                continue
            last_heard = steady_time() - (self._server.silent_seconds(node_rank) or 0.0)
            self.lost[node_rank] = last_heard
            name = hostnames[node_rank]
            self._record(NodeLost(node=name, last_heard=last_heard, detail=f"lost contact with {name}"))
            if node_rank in self._server.directive.members and not self._server.directive.paused:
                lost_members.append(name)
        # Agents that are asked to stop leave before this one ends the attempt, so they must know the saver by then.
        saver = self._view().saver
        if saver != self._server.directive.saver:
            self._direct(saver=saver)
        if lost_members:
            is_first = len(lost_members) == len(self.lost)
            # `lost` keeps nodes that were lost earlier; a node lost only now fell silent about LOST_SECONDS ago.
            failed_at = min(self.lost.values()) if is_first else steady_time() - LOST_SECONDS
            detail = f"lost contact with {few(lost_members)}"
            self._notice(self._failure(Cause.NODE_FAILURE, failed_at, detail, node=lost_members[0]))

    def _find_failed_ranks(self, view: AttemptView) -> None:
        if self._server.directive.paused:
            return  # the agents are killing the ranks: some fail first, because they lose their peers
        root = self._root_failure.find(view.failures, all_heard=self._all_heard())
        if root is None:
            return
        if root.cause == Cause.BAD_NODE:
            self.bad_nodes |= {node_rank for node_rank, name in enumerate(view.hostnames) if name == root.node}
        detail, signature = explain(root, view.ended_ranks(root.round, root.restarts))
        failure = self._failure(
            Cause(root.cause), root.failed_at, detail, rank=root.rank, node=root.node, signature=signature
        )
        # Use the failed rank's own step, not the last step of all ranks: the same failure happens at the same step,
        # whether the other ranks finish that step or not.
        step = failure.step if root.step is None else root.step
        counted = None if self.counted.is_reported else max(self.counted.done or 0, root.counted_steps or 0) or None
        self._notice(structs.replace(failure, step=step, counted_steps=counted))
        self._replaced_until = self._root_failure.explained_until

    def _all_heard(self) -> bool:
        """Return whether every other member that takes part and is not lost has just reported."""
        over = {node_rank for node_rank, status in self._server.statuses().items() if status.phase in OVER}
        others = {*self._server.directive.members} - {self._node.allocation.node_rank, *self.lost, *over}
        return all((self._server.silent_seconds(node_rank) or 0.0) < _FRESH_SECONDS for node_rank in others)

    def _abort_hung_ranks(self, view: AttemptView) -> None:
        """Have all ranks killed if some hang. torchrun restarts them, except on a node where they cannot be killed."""
        if view.lost & {*view.directive.members} or view.directive.paused or not self._all_heard():
            return  # the ranks wait for a node that is or may be dead, or are being killed
        hang = find_hang(view.heartbeats, self._node.spec.recovery.hang_timeout.typed)
        if hang is None or self._stop:
            return
        # A hang that began before the last interruption belongs to it: those ranks are being killed and restarted.
        if self._replaced_until > steady_time() - hang.seconds:
            return
        nodes = {node for rank in hang.unkillable if (node := view.node_of(rank)) is not None}
        # If several nodes are stuck, the cause is the storage that they share.
        stuck = nodes if len(nodes) == 1 else set[int]()
        self.stuck |= stuck
        self.bad_nodes |= stuck
        self._direct(abort_count=self._server.directive.abort_count + 1)
        # The same hang happens at the same step. If the program promises no steps, only heartbeats show the step.
        step = self.last_step or self.counted.done or 0
        signature = None if stuck else "" if self._node.spec.program.reports_steps else f"after step {step}"
        failure = self._failure(
            Cause.BAD_NODE if stuck else Cause.HANG, steady_time() - hang.seconds,
            hang.detail + describe_ended(self._starts.ended), rank=hang.rank,
            node=next(iter(self._node.allocation.names(stuck)), None), signature=signature,
        )  # fmt: skip
        self._notice(failure)
        # All ranks started until now are killed, so their failures are explained.
        self._replaced_until = self._root_failure.explained_until = self._root_failure.aborted_at = steady_time()

    def _failure(self, cause: Cause, failed_at: float, detail: str, **fields: Any) -> Interrupted:
        return Interrupted(
            cause=cause, failed_at=failed_at, noticed_at=steady_time(), step=self.last_step, detail=detail,
            counted_steps=self.counted.done, **fields,
        )  # fmt: skip

    # --- what the ranks do ---

    def _count_steps(self, view: AttemptView) -> None:
        number, beats = view.directive.round, view.heartbeats.values()
        if first_step := self.counted.update(number, beats, view.starts, view.world_size):
            self._record(first_step)
        if record := self.counted.to_record():
            self._node.storage.request(partial(self._node.show_steps, record))

    def _report_starts(self, view: AttemptView) -> None:
        is_failing = self._unjudged or self._root_failure.is_settling
        if not view.directive.members or view.directive.preflight or view.directive.paused or self._stop or is_failing:
            return
        event = self._starts.find(view.directive.round, view.world_size, view.starts)
        if isinstance(event, RanksEnded):
            self._record(event, f"{rank_names(event.ranks)} ended with exit code 0, and the other ranks still run")
        elif event is not None:
            self._record(event)

    def _report_stragglers(self, view: AttemptView) -> None:
        for slow in self._stragglers.find(view.heartbeats):
            node_rank = view.node_of(slow.rank)
            node = "its node" if node_rank is None else view.hostnames[node_rank]
            self._record(
                structs.replace(slow, node=node),
                f"rank {slow.rank} on {node} slows the others down: it works {slow.busy_seconds:.3f} s per step, "
                f"the others {slow.median_seconds:.3f} s",
            )

    def _report_silence(self, view: AttemptView) -> None:
        if view.heartbeats and is_silent(view.heartbeats) != self._is_silent:
            self._is_silent = not self._is_silent
            seconds = min(heartbeat.still_seconds for heartbeat in view.heartbeats.values())
            event = RanksSilent(seconds=seconds if self._is_silent else 0.0)
            self._record(event, describe_silence(seconds) if self._is_silent else "")

    # --- who trains ---

    def _choose_members(self, view: AttemptView) -> None:
        """Announce another round or a pause, or end the attempt, if the states of the nodes require it."""
        directive = view.directive
        if self._stop:
            phases = {status.phase for node_rank, status in view.statuses.items() if node_rank not in view.lost}
            # Ranks cannot save together with a bad node: torchrun would restart them until Slurm kills the job.
            if Phase.RUNNING not in phases or self.bad_nodes & {*directive.members}:
                self._end()
            return
        if self._node.attempt.start_once and directive.members and not directive.preflight:
            self._end_only_round(view)
            return
        decision = decide_round(view)
        if decision.failed:
            self._end_for_lack_of_nodes(decision.failed, view)
        elif decision.done and directive.preflight:
            names = [view.hostnames[node_rank] for node_rank in directive.members]
            self._preflight_passed.update(names)
            self._record(Checked(nodes=tuple(names)))
            self._announce_round(directive.members[: view.max_nodes], view)
        elif decision.done:
            self._end(done=True)
        elif decision.members and not self._must_wait(decision.members, view):
            self._announce_round(decision.members, view)
        elif decision.wait:
            self._direct(paused=True)

    def _end_only_round(self, view: AttemptView) -> None:
        """With --start-once, end the attempt when its only round has ended: no other round may start the ranks."""
        if view.has_failed_torchrun or view.has_left:
            # The rank that failed becomes known within seconds, and ends the attempt (`_find_failed_ranks`).
            self._stopped_since = self._stopped_since or time.monotonic()
            if time.monotonic() - self._stopped_since > _ROOT_SECONDS:
                self._end_for_lack_of_nodes("torchrun failed: see hpc logs --all", view)
        elif [status.phase for status in view.current] == [Phase.ENDED] * len(view.directive.members):
            self._end(done=True)

    def _end_for_lack_of_nodes(self, reason: str, view: AttemptView) -> None:
        failure = lack_of_nodes(reason, view, self._last_failure, self._failure(Cause.CRASHED, steady_time(), ""))
        self._end(with_known_steps(failure, reports_steps=self._knows_steps))

    def _awaited(self) -> frozenset[int]:
        """Return the node ranks of lost nodes whose link may come back."""
        server, lost = self._server, self.lost.keys() - self.bad_nodes
        silent = {rank: server.silent_seconds(rank) or 0.0 for rank in lost if not server.has_ended(rank)}
        recent = [rank for rank, seconds in silent.items() if seconds < LINK_SECONDS]
        limit = self._patience.seconds([self._node.allocation.hostnames[rank] for rank in recent]) if recent else 0.0
        return frozenset(rank for rank in recent if silent[rank] < limit)

    def _must_wait(self, members: tuple[int, ...], view: AttemptView) -> bool:
        """Return whether the next round must not begin yet: in a pause, or while a preflight waits for spares."""
        if time.monotonic() < self._paused_until:
            return True
        if view.directive.round > 0 or not view.num_pending or not self._must_check(members):
            return False
        self._enough_since = self._enough_since or time.monotonic()
        return time.monotonic() - self._enough_since < _SPARES_SECONDS

    def _must_check(self, members: tuple[int, ...]) -> bool:
        """Return whether the next round of these members is a preflight."""
        names = {self._node.allocation.hostnames[node_rank] for node_rank in members}
        return self._node.spec.program.preflight is not None and not names <= self._preflight_passed

    def _announce_round(self, members: tuple[int, ...], view: AttemptView) -> None:
        is_short = time.monotonic() - self._announced < _SHORT_SECONDS
        self._failed_rounds = self._failed_rounds + 1 if view.has_failed_torchrun and is_short else 0
        self._announced = time.monotonic()
        number = view.directive.round + 1
        port = view.statuses[members[0]].port
        preflight = self._must_check(members)
        self._record(RoundStarted(round=number, port=port, members=members))
        if preflight and number == 1:
            # A spare that is checked now can replace a lost node without another preflight.
            members = (*members, *(rank for rank in view.able if rank not in members))
        # The agents have killed the ranks of the last round, or kill them now, so their ends are not failures.
        self._replaced_until = self._root_failure.explained_until = steady_time()
        host = self._server.address(members[0])
        self._direct(
            round=number, members=members, saver=members[0], host=host, port=port, preflight=preflight, paused=False
        )
