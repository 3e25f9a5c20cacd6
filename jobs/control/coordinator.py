"""What the head node's agent decides during an attempt: who is lost, what failed, who trains, when it is over.

Runs on compute nodes. It looks a few times a second at the reports of all agents; nothing here waits.
"""

import time
from dataclasses import dataclass, replace

from hpc.core import ledger
from hpc.core.attempts import attempts_of, failures_in_a_row
from hpc.core.outcome import Cause, is_consequence, may_restart
from hpc.slurm import relaunch
from jobs.context import AgentContext
from jobs.control.channel import LOST_SECONDS, ControlServer
from jobs.control.hang_detection import hung
from jobs.control.membership import MembershipView, NodeLimits, next_step
from jobs.control.messages import OVER, Directive, Phase, RankFailure, RankHeartbeat
from jobs.log import log

# Long enough that all agents have told of the ranks that ended together, and that a dead node's silence shows.
_SETTLE_SECONDS, _FRESH_SECONDS = 1.0, 0.9
_FENCE_SECONDS = 5.0
# What came about longer ago is not the reason for what happens now.
_RECENT_SECONDS = 60.0
# Rounds that end sooner than this because torchrun failed are counted.
_SHORT_SECONDS = 120.0
# Twice as long as the others for so many seconds on end is slow; a hundredth of a second is noise.
_SLOW_FACTOR, _SLOW_LEAST_SECONDS, _SLOW_FOR_SECONDS = 2.0, 0.02, 10.0


@dataclass(frozen=True, kw_only=True)
class RoundFailure:
    """Something that interrupted the training."""

    cause: Cause
    failed_at: float
    noticed_at: float
    """Seconds since the epoch, both."""
    step: int | None
    """The last step that any rank had done; None of a script, whose steps nobody knows."""
    detail: str
    rank: int | None = None
    node: str | None = None


def _by_time(failure: RankFailure) -> tuple[bool, float]:
    """The order in which ranks failed: those that died of another one's death after it."""
    return is_consequence(failure.detail), failure.failed_at


class Coordinator:
    """Decides for all agents of an attempt."""

    def __init__(self, node: AgentContext, hub: ControlServer, limits: NodeLimits) -> None:
        self._node, self._hub, self._limits = node, hub, limits
        self.verdict: RoundFailure | None = None
        """What ended the attempt; None if it ended well, or was asked to stop."""
        self.done = False
        """Whether the torchrun of every member ended well."""
        self.lost: dict[int, float] = {}
        """Node ranks that fell silent, and when, in seconds since the epoch."""
        self.unfit: set[int] = set()
        """AgentContext ranks that failed the preflight."""
        self._began = self._announced = self._looked = time.monotonic()
        self.peak = 0
        """The last step that any rank had done since the last interruption."""
        self._failed_rounds = 0
        self._counted: set[RankFailure] = set()
        self._failures_seen: float | None = None
        self._last: RoundFailure | None = None
        self._victims_before = 0.0
        self._met = list[tuple[str, int | None]]()
        self._slow: dict[int, float] = {}
        checked = (event["nodes"] for event in ledger.read(node.run.events) if event["event"] == "checked")
        self._checked = {name for names in checked for name in names}

    @property
    def signal(self) -> str | None:
        """What asked the run to stop: it may have reached other nodes than this one."""
        own = self._node.stop.signal
        told = (report.signal for report in self._hub.reports().values() if report.signal)
        return own.name if own else next(told, None)

    def tick(self) -> None:
        """One look, and what follows from it."""
        if self._hub.orders.over:
            return
        self._note_lost()
        beats = self._beats()
        self.peak = max([self.peak, *(beat.step for beat in beats.values())])
        self._note_failures()
        self._abort_hung(beats)
        self._name_slow(beats)
        if not self._hub.orders.over:
            self._form()

    # --- what is seen ---

    def _beats(self) -> dict[int, RankHeartbeat]:
        """Of all ranks of the round, by rank."""
        orders, reports = self._hub.orders, self._hub.reports()
        members = [reports[rank] for rank in orders.members if rank in reports and rank not in self.lost]
        return {beat.rank: beat for report in members if report.round == orders.round for beat in report.beats}

    def _name(self, node_rank: int) -> str:
        return self._node.place.hostnames[node_rank]

    def _note_lost(self) -> None:
        """Nodes that are silent, though they have not left; those that fall silent together are one interruption."""
        members = list[str]()
        for node_rank, report in self._hub.reports().items():
            silent = self._hub.silent_seconds(node_rank) or 0.0
            known = node_rank in self.lost or node_rank == self._node.place.node_rank
            if known or report.phase in OVER or silent <= LOST_SECONDS:
                continue
            self.lost[node_rank] = heard = time.time() - silent
            name = self._name(node_rank)
            self._node.note("node_lost", node=name, last_heard=heard, detail=f"{name} says nothing any more")
            if node_rank in self._hub.orders.members:
                members.append(name)
        if members:
            heard = min(self.lost.values()) if len(members) == len(self.lost) else time.time() - LOST_SECONDS
            detail = f"{', '.join(members)} says nothing any more"
            self._meet(self._interruption(Cause.NODE_FAILURE, heard, detail, node=members[0]))

    def _interruption(self, cause: Cause, failed_at: float, detail: str, **place: object) -> RoundFailure:
        now = time.time()
        step = self.peak if self._node.spec.train else None
        return RoundFailure(cause=cause, failed_at=failed_at, noticed_at=now, step=step, detail=detail, **place)  # type: ignore[arg-type]

    # --- what failed ---

    def _note_failures(self) -> None:
        """Ranks that ended badly: the first of those that ended together is the one that failed."""
        since = self._victims_before
        failures = {failure for report in self._hub.reports().values() for failure in report.failures} - self._counted
        # Those that ran when the last interruption came about are its victims.
        # So are those that an order to abort reached late, when torchrun had started them anew.
        fresh = sorted((f for f in failures if f.started_at > since and f.signal != "SIGABRT"), key=_by_time)
        self._counted |= failures - set(fresh)
        if not fresh:
            self._failures_seen = None
            return
        self._failures_seen = self._failures_seen or time.monotonic()
        if time.monotonic() - self._failures_seen < _SETTLE_SECONDS or not self._all_heard():
            return
        self._failures_seen = None
        self._counted |= failures
        # Where one node is unfit the ranks of the others leave too, and may be quicker.
        first = next((failure for failure in fresh if failure.cause == Cause.BAD_NODE), fresh[0])
        if first.cause == Cause.BAD_NODE:
            self.unfit |= {rank for rank in range(self._node.place.num_nodes) if self._name(rank) == first.node}
        what = f"signal {first.signal}" if first.signal else f"exit code {first.exit_code}"
        detail = f"rank {first.rank} on {first.node}: {what}" + (f": {first.detail}" if first.detail else "")
        met = self._interruption(Cause(first.cause), first.failed_at, detail, rank=first.rank, node=first.node)
        # Its own step, not the furthest rank's: what fails at the same step every time makes no progress, though the
        # others may have finished that step, or not.
        self._meet(met if met.step is None or first.step is None else replace(met, step=first.step))

    def _all_heard(self) -> bool:
        """Whether every member has spoken since: one that has not may be the dead node that the others fail of."""
        others = (rank for rank in self._hub.orders.members if rank != self._node.place.node_rank)
        return all((self._hub.silent_seconds(rank) or 0.0) < _FRESH_SECONDS for rank in others if rank not in self.lost)

    def _abort_hung(self, beats: dict[int, RankHeartbeat]) -> None:
        """Ranks without a sign of life: all are killed, and torchrun starts them again."""
        found = hung(beats, self._node.spec.recovery.hang_timeout)
        if found is None or self._node.stop or self._victims_before > time.time() - found.seconds:
            return
        self._meet(self._interruption(Cause.HANG, time.time() - found.seconds, found.detail, rank=found.rank))
        # Whoever began before now is a victim of it.
        self._victims_before = time.time()
        if not self._hub.orders.over:
            self._hub.orders = replace(self._hub.orders, aborts=self._hub.orders.aborts + 1)

    def _meet(self, interruption: RoundFailure) -> None:
        """Write an interruption down, or end the attempt with it."""
        self._last, self.peak = interruption, 0
        self._victims_before = interruption.failed_at
        if not self._is_worth_another_try(interruption):
            self._end(interruption)
            return
        self._node.note(
            "interruption", cause=interruption.cause, step=interruption.step, rank=interruption.rank,
            node=interruption.node, detail=interruption.detail, failed_at=interruption.failed_at,
            noticed_at=interruption.noticed_at, round=self._hub.orders.round,
        )  # fmt: skip
        log(f"{interruption.cause}: {interruption.detail}")

    def _is_worth_another_try(self, interruption: RoundFailure) -> bool:
        """As the earlier attempts tell, and this one as far as it is in memory: a full disk takes no events."""
        self._met.append((interruption.cause, interruption.step))
        *earlier, this = attempts_of(ledger.read(self._node.run.events))
        this = replace(this, interruptions=tuple(self._met))
        return may_restart(interruption.cause, failures_in_a_row([*earlier, this]))

    def _end(self, verdict: RoundFailure | None = None, *, done: bool = False) -> None:
        self.verdict, self.done = verdict, done
        self._hub.orders = replace(self._hub.orders, over=True)

    # --- who is slow ---

    def _name_slow(self, beats: dict[int, RankHeartbeat]) -> None:
        """A rank whose own work takes much longer than the others' holds all of them up."""
        busy = {rank: beat.busy_seconds for rank, beat in beats.items() if beat.busy_seconds is not None}
        ordered = sorted(busy.values())
        for rank, seconds in busy.items():
            # Of two, the other one; of many, the one in the middle.
            usual = ordered[(len(ordered) - 1) // 2] if len(ordered) > 1 else seconds
            if seconds < max(_SLOW_FACTOR * usual, usual + _SLOW_LEAST_SECONDS):
                self._slow.pop(rank, None)
                continue
            since = self._slow.setdefault(rank, time.monotonic())
            if time.monotonic() - since > _SLOW_FOR_SECONDS:
                self._slow[rank] = float("inf")  # once is enough
                node = self._name_of_rank(rank)
                self._node.note("slow_rank", rank=rank, node=node, busy_seconds=seconds, median_seconds=usual)
                log(
                    f"rank {rank} on {node} works {seconds:.3f} s a step, the others {usual:.3f} s: "
                    "it holds all of them up"
                )

    def _name_of_rank(self, rank: int) -> str | None:
        reports = self._hub.reports()
        places = (n for n in reports for beat in reports[n].beats if beat.rank == rank)
        return next((self._name(place) for place in places), None)

    # --- who trains ---

    def _form(self) -> None:
        """Announce the next round, or the end."""
        hub, reports = self._hub, self._hub.reports()
        if self._is_fenced():
            self._end()
            return
        if self._node.stop:
            if not any(reports[rank].phase is Phase.RUNNING for rank in reports.keys() - self.lost.keys()):
                self._end()
            return
        view = MembershipView(
            nodes=self._node.place.num_nodes,
            reports=reports,
            gone=frozenset({*self.lost, *self.unfit}),
            waited_seconds=time.monotonic() - self._began,
            failed_rounds=self._failed_rounds,
        )
        step = next_step(hub.orders, view, self._limits)
        if step.failed:
            self._end(self._why(step.failed))
        elif step.done and hub.orders.preflight:
            self._note_checked(hub.orders)
            self._announce(hub.orders.members, hub.orders)
        elif step.done:
            self._end(done=True)
        elif step.members:
            self._announce(step.members, hub.orders)

    def _announce(self, members: tuple[int, ...], before: Directive) -> None:
        reports = self._hub.reports()
        failed = any(reports[rank].exit_code and reports[rank].round == before.round for rank in before.members)
        short = time.monotonic() - self._announced < _SHORT_SECONDS
        self._failed_rounds = self._failed_rounds + 1 if failed and short else 0
        self._announced = time.monotonic()
        # Our trainer checks them itself, at every start: that takes no second import of torch.
        preflight = not self._node.spec.train and not self._checked.issuperset(map(self._name, members))
        orders = replace(
            before, round=before.round + 1, members=members, port=reports[members[0]].port, preflight=preflight
        )
        self._node.note("rendezvous", round=orders.round, port=orders.port, members=list(members))
        self._hub.orders = orders

    def _note_checked(self, orders: Directive) -> None:
        names = [self._name(rank) for rank in orders.members]
        self._checked.update(names)
        self._node.note("checked", nodes=names)

    def _why(self, failed: str) -> RoundFailure:
        """The interruption that left too few nodes, or that there never were enough."""
        reports = self._hub.reports()
        told = [f"{self._name(r)}: {report.detail}" for r, report in reports.items() if report.phase is Phase.FAILED]
        if self._last and time.time() - self._last.noticed_at < _RECENT_SECONDS and not told:
            return replace(self._last, detail=f"{self._last.detail}; {failed}")
        cause = Cause.NODE_FAILURE if self.lost else Cause.CRASHED
        return self._interruption(cause, time.time(), "; ".join([*told, failed]))

    def _is_fenced(self) -> bool:
        """Whether other agents, which did not hear of this one, have ended the attempt."""
        if time.monotonic() - self._looked < _FENCE_SECONDS:
            return False
        self._looked = time.monotonic()
        return relaunch.has_ended(self._node.run, self._node.attempt.attempt)
