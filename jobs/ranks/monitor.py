"""Polls and reports the heartbeats and failures of this node's ranks, from outside the ranks. Runs in every agent."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, json

from hpc.base.kernel import activity, children, process_state, steady_time
from hpc.run.causes import Cause, cause_of_exit
from hpc.run.events.kinds import RankFailed
from hpc.run.nodedir import HeldNodeDir, NodeDir
from jobs.control.channel import AgentClock, ControlChannel, ControlClient
from jobs.control.messages import RankHeartbeat, RankStart
from jobs.control.rank_health import COUNTED, UNWATCHED
from jobs.control.silent_nodes import Patience
from jobs.node_attempt import NodeAttempt, log
from jobs.ranks.script.step_counter import read_count
from jobs.stop_request import StopRequest

# The most failures in a status: enough that a busy first node's agent misses none. The event files have all failures.
_KEPT_FAILURES = 16
_INTERVAL_SECONDS, _RETRY_SECONDS = 0.2, 2.0
# Threads that wait use some processor time, too.
_MEASURE_SECONDS, _IDLE_SHARE = 5.0, 0.05


_Whole = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Seconds = Annotated[float, Meta(ge=0)]


class _Heartbeat(Struct, frozen=True, kw_only=True):
    """What a rank writes. A user's script may write it itself, so each field is checked."""

    pid: _Whole
    rank: _Whole | None = None
    step: _Whole = 0
    phase: str = ""
    count: Any = None
    """Differs from one sign of life to the next."""
    step_seconds: _Seconds | None = None
    busy_seconds: _Seconds | None = None


@dataclass(kw_only=True)
class _Activity:
    """What a rank without heartbeats has done when it was last seen active. Times are those of time.monotonic()."""

    pid: int
    seconds: float = 0.0
    volume: int = -1
    measured_at: float = -inf
    active_at: float = 0.0

    def measure(self, now: float, still_seconds: float) -> None:
        """Note whether the rank's processes have done something: used the processor, or read or written."""
        self.measured_at = now
        seconds, volume = activity(self.pid)
        if volume != self.volume or seconds - self.seconds > _IDLE_SHARE * still_seconds:
            self.seconds, self.volume, self.active_at = seconds, volume, now


class LocalRanks:
    """Reads the heartbeats and failures that the ranks of one node write, round after round."""

    def __init__(self, node_dir: NodeDir, num_ranks: int, host: str, clock: AgentClock) -> None:
        self._node_dir, self._num_ranks, self._host, self._clock = node_dir, num_ranks, host, clock
        self._last_signs: dict[int, tuple[Any, float]] = {}
        self._round, self._exit_codes = 0, dict[int, Cause]()
        self._looked_at = 0.0
        self._mentioned = set[tuple[int, str]]()
        self._activity = dict[int, _Activity]()
        # Files may be left from the ranks of an earlier attempt whose agent was killed.
        self._remove_files()

    def begin(self, number: int, exit_codes: Mapping[int, Cause]) -> None:
        """Begin a round: remove the files of the last round's ranks. `exit_codes` has causes by exit code."""
        self._round, self._exit_codes, self._last_signs = number, dict(exit_codes), {}
        self._remove_files()

    def _remove_files(self) -> None:
        for path in (*self._node_dir.exits.iterdir(), *self._node_dir.heartbeat(0).parent.iterdir()):
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """End a round: forget the ranks that the agent has killed, because they have not failed."""
        for path in self._node_dir.running_ranks():
            path.unlink(missing_ok=True)

    def heartbeats(self) -> tuple[RankHeartbeat, ...]:
        """Return the last heartbeat of each rank that is alive."""
        watched = [beat for number in range(self._num_ranks) if (beat := self._watched(number))]
        if len(watched) == self._num_ranks:
            return tuple(watched)
        running = filter(None, map(_read, self._node_dir.running_ranks()))
        ranks = {beat.rank for beat in watched}
        return (*watched, *(self._unwatched(**fields) for fields in running if fields["rank"] not in ranks))

    def starts(self) -> tuple[RankStart, ...]:
        """Return the last start of each rank in the round, unless that rank has failed."""
        starts = {}
        # The file of a rank's end is older than the file of the process that has replaced that rank.
        for path in (*self._node_dir.exits.glob("ended-*.json"), *self._node_dir.running_ranks()):
            if fields := _read(path):
                starts[fields["rank"]] = RankStart(
                    rank=fields["rank"], restarts=fields["restarts"], has_ended=path.name.startswith("ended-"),
                    counted_steps=fields.get("counted_steps"),
                )  # fmt: skip
        return tuple(starts.values())

    def _unwatched(self, *, rank: int, pid: int, **_: Any) -> RankHeartbeat:
        """Return a heartbeat of a rank that writes none. What its processes do are its signs of life."""
        own = children(pid)[:1]
        return RankHeartbeat(
            rank=rank, step=0, phase=UNWATCHED, state=(process_state(own[0]) or "") if own else "",
            still_seconds=round(self._idle_seconds(rank, pid), 2), step_seconds=None, busy_seconds=None,
        )  # fmt: skip

    def _idle_seconds(self, rank: int, pid: int) -> float:
        """Return for how many seconds a process of a rank, and what it has started, have done nothing."""
        last, now = self._activity.get(rank), time.monotonic()
        if last is None or last.pid != pid:
            last = self._activity[rank] = _Activity(pid=pid)
        if now > last.measured_at + _MEASURE_SECONDS:
            last.measure(now, self._clock.since(last.active_at))
        return self._clock.since(last.active_at)

    def _watched(self, local_rank: int) -> RankHeartbeat | None:
        """Return the heartbeat of a rank that runs, and writes heartbeats or counts its steps; None if it does neither.

        A script that writes heartbeats is believed. If it writes none, its optimizer steps are counted.
        """
        for beat in (self._written(local_rank), self._counted(local_rank)):
            state = process_state(beat.pid) if beat else None
            if beat is None or state in {None, "Z"}:
                continue
            rank = local_rank if beat.rank is None else beat.rank
            sign = beat.pid, beat.count, beat.step
            if self._last_signs.get(local_rank, (None, 0.0))[0] != sign:
                self._last_signs[local_rank] = sign, time.monotonic()
            still = self._clock.since(self._last_signs[local_rank][1])
            if beat.phase == COUNTED:
                still = min(still, self._idle_seconds(rank, beat.pid))
            return RankHeartbeat(
                rank=rank, step=beat.step, phase=beat.phase, state=state or "", still_seconds=round(still, 2),
                step_seconds=beat.step_seconds, busy_seconds=beat.busy_seconds,
            )  # fmt: skip
        return None

    def _counted(self, local_rank: int) -> _Heartbeat | None:
        count = read_count(str(self._node_dir.heartbeat(local_rank)))
        if count is None:
            return None
        return _Heartbeat(
            pid=count.pid, rank=count.rank, step=count.steps, phase=COUNTED, step_seconds=count.step_seconds
        )

    def _written(self, local_rank: int) -> _Heartbeat | None:
        """Return a rank's heartbeat; None if there is none or a field is wrong, which is logged once."""
        try:
            return json.decode(self._node_dir.heartbeat(local_rank).read_bytes(), type=_Heartbeat)
        except ValidationError as error:
            if (local_rank, str(error)) not in self._mentioned:
                self._mentioned.add((local_rank, str(error)))
                log(f"the heartbeat of local rank {local_rank} is not used: {error}")
        except (OSError, ValueError):
            pass  # there is none, or its process is writing it
        return None

    def new_failures(self, clock_skew_seconds: float = 0.0) -> list[RankFailed]:
        """Return the failures of ranks since the last call, with times by the first node's clock."""
        failures = []
        records = [(path, _read(path)) for path in sorted(self._node_dir.exits.glob("[0-9]*.json"))]
        for path, fields in (*records, *self._vanished()):
            path.unlink(missing_ok=True)
            if fields is None:
                continue
            for key in ("started_at", "failed_at"):
                fields[key] = steady_time(fields[key]) + clock_skew_seconds
            memory, signal, detail = fields.pop("out_of_memory"), fields["signal"], fields["detail"]
            cause = cause_of_exit(fields["exit_code"], signal, memory, detail, self._exit_codes)
            failures.append(RankFailed(node=self._host, round=self._round, cause=cause, **fields))
        self._looked_at = time.monotonic()
        return failures

    def _vanished(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the file and the failure of each rank whose wrapper was killed, and so could not record the failure."""
        for path in self._node_dir.running_ranks():
            fields = _read(path)
            # A wrapper that ends by itself removes its file first.
            if fields is None or process_state(fields["pid"]) not in {None, "Z"} or not path.exists():
                continue
            yield (
                path,
                {
                    **{name: fields[name] for name in ("rank", "restarts", "started_at")},
                    # The wrapper was last seen alive at this time, before the failures that its end causes.
                    "failed_at": max(fields["started_at"], self._looked_at),
                    "exit_code": -signal.SIGKILL,
                    "signal": signal.SIGKILL.name,
                    "out_of_memory": False,
                    "step": None,
                    "detail": "its process wrapper was killed",
                },
            )


def _read(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing or has no complete object."""
    try:
        fields = json.decode(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


class NodeMonitor:
    """Reports the state of this node's ranks and runs callbacks. The agent calls `poll` in every loop that waits."""

    def __init__(self, node: NodeAttempt, held: HeldNodeDir, channel: ControlChannel, stop: StopRequest) -> None:
        self._node, self._held, self._channel, self.stop = node, held, channel, stop
        self.node_dir = held.files
        """The run's files on this node."""
        self.ranks = LocalRanks(self.node_dir, node.spec.resources.ranks_per_node, node.host, channel.clock)
        self.callbacks = list[Callable[[], None]]()
        """Functions that every poll calls."""
        self._patience = Patience(node)
        self._failures: tuple[RankFailed, ...] = ()
        self.last_step = 0
        """The last step that a rank of this node has done in this attempt."""
        self.counted_steps: int | None = None
        """The steps that a script's ranks have counted since their last start; None if a rank reports its steps."""
        self._next = 0.0

    @property
    def must_leave(self) -> bool:
        """Whether this node must end its work: it was asked to stop, the attempt is over, or the first node is lost."""
        return bool(self.stop) or self._channel.directive.over or self._first_node_is_lost()

    def _first_node_is_lost(self) -> bool:
        """Return whether the first node has been silent for so long that this node no longer waits for it."""
        channel = self._channel
        if not isinstance(channel, ControlClient) or not channel.first_node_is_silent:
            return False
        host = self._node.allocation.first_node
        return channel.first_node_has_ended or channel.silent_seconds > self._patience.seconds([host])

    def begin_round(self, number: int, exit_codes: Mapping[int, Cause]) -> None:
        """Restore this node's files if they are gone, and begin a round (`LocalRanks.begin`)."""
        self._restore_node_dir()
        self.ranks.begin(number, exit_codes)

    def _restore_node_dir(self) -> None:
        """Restore the run's directory on this node: without it, a rank could report neither a failure nor a hang."""
        if self._held.restore():
            log(f"{self.node_dir.path} was emptied, and its snapshots are lost")

    def poll(self, *, now: bool = False) -> None:
        """Report the state of the ranks and run the callbacks: `now`, or if the last poll was 0.2 s ago or more."""
        if time.monotonic() < self._next and not now:
            return
        self._next = time.monotonic() + _INTERVAL_SECONDS
        self._restore_node_dir()
        failures = self.ranks.new_failures(self._channel.clock_skew_seconds)
        for failure in failures:
            self._node.record_later(failure)
        self._failures = (*self._failures, *failures)[-_KEPT_FAILURES:]
        # In this order: the heartbeat of a rank that has replaced another one must not be that of the other one.
        starts, heartbeats = self.ranks.starts(), self.ranks.heartbeats()
        self.last_step = max([self.last_step, *(beat.step for beat in heartbeats if beat.phase != COUNTED)])
        if phases := {beat.phase for beat in heartbeats} - {UNWATCHED}:
            self.counted_steps = max(beat.step for beat in heartbeats) if phases == {COUNTED} else None
        if self._channel.directive.stop:
            self.stop.handle(signal.SIGTERM, None)
        self._channel.report(heartbeats=heartbeats, starts=starts, failures=self._failures, signal=self.stop.name)
        try:
            for callback in self.callbacks:
                callback()
        except OSError as error:
            # Shared storage that does not answer for a while (ESTALE, EIO) must not end the agent: the ranks may not
            # need it.
            log(f"{error}: trying again")
            self._next += _RETRY_SECONDS
