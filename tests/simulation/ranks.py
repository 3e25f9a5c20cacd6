"""Simulated torchruns and ranks: what the agents start, kill and read."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torchrelay.checkpoint_files import (
    KEPT_SNAPSHOTS,
    STATE_TENSORS,
    STATE_VALUES,
    list_checkpoints,
    save_checkpoint,
    step_of,
)
from torchrelay.saving.restoring import FORMAT

from hpc.base.files import append_json_line, write_json
from hpc.base.kernel import steady_time
from hpc.run.causes import Cause, cause_of_exit
from hpc.run.events.kinds import (
    CheckpointSaved,
    Event,
    FirstStep,
    Problem,
    RankFailed,
    TrainCompleted,
    TrainStarted,
    TrainStopped,
)
from hpc.run.events.ledger import EventWriter, SucceededError, attempt_prefix, check_is_newest
from hpc.run.nodedir import NodeDir
from jobs.control.messages import Directive, RankHeartbeat, RankStart
from jobs.node_attempt import NodeAttempt
from simulation.world import Process

if TYPE_CHECKING:
    from simulation.cluster import Cluster

_START_SECONDS, _RESTART_SECONDS = (1.0, 4.0), (0.5, 4.0)
_BETWEEN_STARTS_SECONDS = 3.0  # as in training.runtime.node_rendezvous
_LOOK_SECONDS = 0.2
_KEPT_CHECKPOINTS = 2
PEER_DIED = "Connection closed by peer"
_DEAD_GPU = "CUDA error: uncorrectable ECC error encountered"


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a simulated training behaves."""

    total_steps: int
    step_seconds: float
    snapshot_steps: int
    checkpoint_steps: int


KINDS = ("crash", "killed", "oom", "device", "hang")
"""The failures of a rank."""


class Torchrun:
    """Stands for jobs.ranks.torchrun.Torchrun: the ranks of one node in one round."""

    def __init__(self, cluster: "Cluster", node: NodeAttempt, directive: Directive) -> None:
        self.cluster, self.process = cluster, cluster.process
        self.host, self.node_rank = node.host, node.allocation.node_rank
        self.exit_code: int | None = None
        self.stopping = False
        self.group = cluster.group_of(node, directive)
        self.group.members[self.node_rank] = self
        cluster.local[self.process.pid] = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def present(self) -> bool:
        """Whether its ranks run, or can."""
        return self.exit_code is None and self.process.alive

    def ranks(self) -> list[int]:
        return [self.process.pid + 100_000] if self.present and self.group.training else []

    def kill_stuck_forks(self) -> None:
        """No fork is stuck here."""

    def forward(self, _numbers: Sequence[signal.Signals]) -> None:
        self.stopping = self.stopping or bool(self.ranks())

    def abort_ranks(self) -> None:
        if self.ranks():
            self.group.fail(self.node_rank, -signal.SIGABRT, "SIGABRT", "Fatal Python error: Aborted")

    def kill(self, _seconds: float = 0.0) -> None:
        if self.exit_code is None:
            self.exit_code = -9


class LocalRanks:
    """Stands for jobs.ranks.monitor.LocalRanks."""

    def __init__(self, _node_dir: NodeDir, _num_ranks: int, host: str, clock: Any) -> None:
        from simulation.cluster import Cluster

        self._cluster, self._host, self._clock = Cluster.present(), host, clock
        self._pid = self._cluster.process.pid
        self._round, self._exit_codes = 0, dict[int, Cause]()

    def begin(self, number: int, exit_codes: Mapping[int, Cause]) -> None:
        self._round, self._exit_codes = number, dict(exit_codes)

    def end(self) -> None:
        self._cluster.failed.pop(self._pid, None)

    def heartbeats(self) -> tuple[RankHeartbeat, ...]:
        torchrun = self._cluster.local.get(self._pid)
        if torchrun is None or not torchrun.ranks():
            return ()
        group, rank = torchrun.group, torchrun.group.rank_of(torchrun.node_rank)
        still = self._clock.since(group.moved.get(torchrun.node_rank, 0.0))
        phase = "step" if group.reports else "script"
        return (
            RankHeartbeat(
                rank=rank, step=group.steps.get(torchrun.node_rank, 0), phase=phase, state="S",
                still_seconds=round(still, 2), step_seconds=group.training_of.step_seconds, busy_seconds=None,
            ),
        )  # fmt: skip

    def starts(self) -> tuple[RankStart, ...]:
        torchrun = self._cluster.local.get(self._pid)
        if torchrun is None or not torchrun.ranks():
            return ()
        group = torchrun.group
        return (RankStart(rank=group.rank_of(torchrun.node_rank), restarts=group.restarts, has_ended=False),)

    def new_failures(self, clock_skew_seconds: float = 0.0) -> list[RankFailed]:
        found = []
        for fields in self._cluster.failed.pop(self._pid, []):
            cause = cause_of_exit(
                fields["exit_code"], fields["signal"], fields.pop("memory"), fields["detail"], self._exit_codes
            )
            for key in ("started_at", "failed_at"):
                fields[key] += clock_skew_seconds
            found.append(RankFailed(node=self._host, round=self._round, cause=cause, **fields))
        return found


class Group:
    """The ranks of a round, on all its nodes."""

    def __init__(self, cluster: "Cluster", node: NodeAttempt, directive: Directive) -> None:
        self.cluster, self.run, self.attempt, self.directive = cluster, node.run, node.attempt.attempt, directive
        self.reports = node.spec.program.reports_steps
        self.training_of = cluster.training
        self.members = dict[int, Torchrun]()
        self.training = False
        self.restarts = 0
        self.step = 0
        self.steps, self.moved = dict[int, int](), dict[int, float]()
        self._is_first = True
        self._failures = dict[int, tuple[int, str, str]]()
        self._started_at = 0.0
        self._hung: str | None = None
        self._process = Process(cluster, "", f"ranks of attempt {self.attempt}, round {directive.round}", 7)
        cluster.spawn(self._process, self._drive)

    def rank_of(self, node_rank: int) -> int:
        """Return the rank on a node."""
        return self.directive.members.index(node_rank)

    def fail(self, node_rank: int, exit_code: int, signal_name: str | None, detail: str) -> None:
        """Let a rank fail."""
        self._failures.setdefault(node_rank, (exit_code, signal_name or "", detail))

    # --- what the ranks do ---

    def _drive(self) -> None:
        world = self.cluster
        pause, earliest = _START_SECONDS, world.now
        while not self._is_over():
            if not self._all_present():
                world.wait(_LOOK_SECONDS)
                continue
            world.wait(max(world.random.uniform(*pause), earliest - world.now))
            pause = _RESTART_SECONDS
            if not self._all_present():
                continue
            earliest = world.now + _BETWEEN_STARTS_SECONDS
            exit_code = self._train()
            self.training = False
            if exit_code is not None:
                for torchrun in self.members.values():
                    if torchrun.exit_code is None:
                        torchrun.exit_code = exit_code
                return
            self._report_failures()
            self.restarts += 1

    def _is_over(self) -> bool:
        return bool(self.members) and not any(torchrun.present for torchrun in self.members.values())

    def _all_present(self) -> bool:
        wanted = self.directive.members
        return all(rank in self.members and self.members[rank].present for rank in wanted)

    def _train(self) -> int | None:
        """Train until the end, a stop or a failure. Returns torchrun's exit code; None if ranks failed."""
        if not self._begin():
            return None
        while True:
            self.cluster.wait(self.training_of.step_seconds)
            if not self._all_alive() or self._failures:
                return None
            injected = None if self._stalls() else self.cluster.take_injected(self)
            if injected is not None:
                self._inject(*injected)
            elif not self._hung and not self._stalls():
                exit_code = self._step()
                if exit_code is not None or self._failures:
                    return exit_code

    def _begin(self) -> bool:
        """Restore the newest state; False if that is not possible."""
        cluster, first = self.cluster, self.members[self.directive.members[0]]
        self._process.host = first.host
        self._failures, self._hung = {}, None
        self._started_at = steady_time()
        try:
            check_is_newest(self.run, self.attempt)
            self.step, source = self._restore()
        except (OSError, SucceededError) as error:
            self.fail(first.node_rank, 1, None, str(error))
            return False
        if broken := [rank for rank, each in self.members.items() if each.host in cluster.broken]:
            self.fail(broken[0], 1, None, _DEAD_GPU)
            return False
        self.training, self._is_first = True, True
        self.moved = dict.fromkeys(self.members, cluster.now)
        self.steps = dict.fromkeys(self.members, self.step)
        if self.reports:
            self._record(TrainStarted(step=self.step, world_size=len(self.members), source=source))
        cluster.has_restored(self, self.step)
        return True

    def _step(self) -> int | None:
        """Do a step on all ranks. Returns torchrun's exit code if it was the last one."""
        self.step += 1
        self.moved = dict.fromkeys(self.members, self.cluster.now)
        self.steps = dict.fromkeys(self.members, self.step)
        self.cluster.has_stepped(self, self.step)
        if self._is_first:
            self._is_first = False
            self._record(FirstStep(step=self.step))
        stopping = any(each.stopping for each in self.members.values())
        done = self.step >= self.training_of.total_steps
        if not self._save(durable=done or stopping or self.step % self.training_of.checkpoint_steps == 0):
            return None
        if done:
            return self._complete()
        if stopping:
            self._record(TrainStopped(step=self.step, signal="SIGTERM", seconds=0.1))
            return 0
        return None

    def _all_alive(self) -> bool:
        """Return whether all ranks run; if some were killed by their agent, the others lose their connections."""
        gone = [rank for rank in self.directive.members if not self.members[rank].present]
        silent = [rank for rank in gone if self.members[rank].host in self.cluster.network.dead]
        for rank in self.members if gone and not silent else ():
            if rank not in gone:
                self.fail(rank, 1, None, PEER_DIED)
        if silent:
            self.cluster.wait(_LOOK_SECONDS)
            return not self._is_over()
        return not gone

    def _stalls(self) -> bool:
        """Return whether the ranks wait for one that is dead, suspended or cut off."""
        cluster, hosts = self.cluster, [torchrun.host for torchrun in self.members.values()]
        if any(not torchrun.present for torchrun in self.members.values()):
            return True
        if any(torchrun.process.suspended_until > cluster.now for torchrun in self.members.values()):
            return True
        return any(cluster.network.is_cut(one, other) for one in hosts for other in hosts if one != other)

    def _inject(self, kind: str, host: str) -> None:
        rank = next(each.node_rank for each in self.members.values() if each.host == host)
        self.cluster.tell(f"a rank on {host} fails: {kind}")
        match kind:
            case "crash":
                self.fail(rank, 1, None, f"RuntimeError: injected at step {self.step}")
            case "killed":
                self.fail(rank, -9, "SIGKILL", "")
            case "oom":
                self.fail(rank, 1, None, "torch.OutOfMemoryError: CUDA out of memory")
            case "device":
                self.cluster.broken.add(host)
                self.fail(rank, 1, None, _DEAD_GPU)
            case "hang":
                self._hung = host

    def _save(self, *, durable: bool) -> bool:
        """Save snapshots on all nodes and, if asked to, a checkpoint. Returns False if a later attempt has begun."""
        if self.step % self.training_of.snapshot_steps == 0 or durable:
            for torchrun in self.members.values():
                memory = self.cluster.memory(self.run, torchrun.host)
                save_checkpoint(memory.snapshots, self.step, self._write_state, KEPT_SNAPSHOTS)
                self.cluster.has_saved(self, torchrun.host, self.step)
        first = self.members[self.directive.members[0]]
        try:
            check_is_newest(self.run, self.attempt)
            if self.reports:
                append_json_line(self.run.train_metrics, {"step": self.step, "epoch": 1, "attempt": self.attempt})
            if durable:
                began = self.cluster.now
                save_checkpoint(
                    self.run.checkpoints, self.step, self._write_state, _KEPT_CHECKPOINTS,
                    check=lambda: check_is_newest(self.run, self.attempt),
                )  # fmt: skip
                self.cluster.has_written(self, began)
                self._record(CheckpointSaved(step=self.step, seconds=0.1, copy_seconds=0.0))
        except SucceededError as error:
            self.fail(first.node_rank, 1, None, str(error))
            return False
        except OSError as error:
            if durable:
                self._record(Problem(what="checkpoint_failed", step=self.step, detail=str(error)))
        return True

    def _write_state(self, directory: Path) -> None:
        (directory / STATE_TENSORS).write_bytes(f"{self.attempt} {self.step}".encode())
        write_json(directory / STATE_VALUES, {"format": FORMAT, "attempt": self.attempt, "step": self.step})

    def _complete(self) -> int | None:
        first = self.members[self.directive.members[0]]
        try:
            check_is_newest(self.run, self.attempt)
            if self.reports:
                self.run.final.mkdir(exist_ok=True)
                write_json(self.run.final_result, {"step": self.step})
                self._record(TrainCompleted(step=self.step))
        except (SucceededError, OSError) as error:
            self.fail(first.node_rank, 1, None, str(error))
            return None
        self.cluster.tell(f"attempt {self.attempt} has done all steps")
        return 0

    def _restore(self) -> tuple[int, str | None]:
        """Return the newest state that any rank can reach, and where it is."""
        found = [(step_of(path), "checkpoint") for path in list_checkpoints(self.run.checkpoints)]
        for torchrun in self.members.values():
            snapshots = self.cluster.memory(self.run, torchrun.host).snapshots
            found += [(step_of(path), "snapshot") for path in list_checkpoints(snapshots)]
        return max(found, default=(0, None))

    def _report_failures(self) -> None:
        """Give each agent the failures of its ranks; the ranks of other nodes fail because of them."""
        if not self._failures:
            return
        now = steady_time()
        for torchrun in self.members.values():
            if not torchrun.present:
                continue
            own = self._failures.get(torchrun.node_rank)
            exit_code, signal_name, detail = own or (1, "", PEER_DIED)
            fields = {
                "rank": self.rank_of(torchrun.node_rank), "started_at": self._started_at,
                "failed_at": now + (0.0 if own else 0.2), "exit_code": exit_code, "signal": signal_name or None,
                "memory": False, "restarts": self.restarts, "step": self.step if self.reports else None,
                "detail": detail,
            }  # fmt: skip
            self.cluster.failed.setdefault(torchrun.process.pid, []).append(fields)

    def _record(self, event: Event) -> None:
        writer = EventWriter(self.run.events / f"{attempt_prefix(self.attempt)}trainer.jsonl", self.attempt)
        try:
            writer.append(event)
        except OSError:
            self.cluster.tell(f"the ranks could not record {event.kind}")
