"""Three calls for a torchrun script of your own: `should_stop`, `report`, `state`. Runs on every rank.

For example::

    from training.relay import report, should_stop, state

    with state(model=model, optimizer=optimizer) as saved:  # restores them, and saves them while they change
        while saved.step < 10_000:
            loss = train(next(batches))
            saved.step += 1
            report(step=saved.step, loss=loss)
            if should_stop():  # on a signal: the same answer on all ranks, at the same step
                break

This file imports nothing of torchrelay: a project that runs where that is not installed has a copy of it. Where no run
of torchrelay has started the script, `should_stop` answers False, and the others do nothing. More is in
docs/tutorials/own-script.md.

Our own trainer stands on the public functions and classes below: stop signals, heartbeat, exchanges between ranks,
checkpoints on the disk, and the choice of the newest one.
"""

import atexit
import errno
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["report", "should_stop", "state"]

# Of `torch`, nothing is imported here: the import takes seconds, in which a signal would not be noticed.

_STATE_FILE, _MANIFEST = "state.pt", "manifest.json"
_NAME, _REJECTED = re.compile(r"step-(\d{8,})"), "rejected-"
# Endings of a directory that is being written or removed, and of one that is being replaced.
_UNFINISHED, _REPLACED = "tmp", "old"
# Errors of file systems that have no fsync of directories.
_UNSUPPORTED = {errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
KEPT_SNAPSHOTS = 2
# Snapshots may take a hundredth of the time.
_SECONDS_PER_COST = 100.0
# Preemption sends SIGTERM; Slurm's --signal, some time before the limit, SIGUSR2.
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2})
# The file of a heartbeat keeps its size (padded with spaces), so a reader always finds one whole record.
_HEARTBEAT_BYTES = 512

WriteFiles = Callable[[Path], dict[str, Any] | None]
Phase = Literal["start", "load", "step", "evaluate", "save", "end", "script"]


class Saveable(Protocol):
    """What can be saved: modules, optimizers, schedulers, torchdata's StatefulDataLoader, objects of your own."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, texts, and lists and dicts of them."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take them back."""


@dataclass(frozen=True, kw_only=True)
class _ThisRank:
    """Where this process stands, from the environment."""

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    run_dir: Path | None
    """None: the script was not started by a run."""
    heartbeat: Path | None
    checkpoints: Path | None
    """Where this rank writes checkpoints; None: another one does."""
    snapshots: Path | None
    """Where this rank writes snapshots; None: another one of its node does, or there are none."""

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Self:
        def path(name: str) -> Path | None:
            return Path(environment[name]) if name in environment else None

        def number(name: str, usual: int) -> int:
            # Other programs that import this module may find anything in such a variable.
            return int(environment[name]) if environment.get(name, "").isdecimal() else usual

        rank, local_rank = number("RANK", 0), number("LOCAL_RANK", 0)
        run_dir = path("TORCHRELAY_RUN_DIR")
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=number("WORLD_SIZE", 1),
            attempt=number("TORCHRELAY_ATTEMPT", 0),
            run_dir=run_dir,
            heartbeat=path("TORCHRELAY_HEARTBEAT"),
            checkpoints=run_dir / "checkpoints" if run_dir and rank == 0 else None,
            snapshots=path("TORCHRELAY_SNAPSHOTS") if local_rank == 0 else None,
        )


_this = _ThisRank.find(os.environ)


class _StopSignals:
    """The signals that ask this process to stop. A handler only records them; the loop acts on them after a step.

    Saving inside a handler hangs now and then (Lightning-AI/pytorch-lightning#21406). The handlers are installed before
    torch is imported, which takes seconds.
    """

    def __init__(self) -> None:
        self._received: list[tuple[int, float]] = []

    def install(self, *others: signal.Signals) -> None:
        """Record the signals that ask to stop, from now on."""
        for number in STOP_SIGNALS.union(others):
            signal.signal(number, self._record)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self._received.append((number, time.monotonic()))

    def received(self) -> int:
        """Return the number of the first signal that arrived, 0 for none. A second one changes nothing."""
        return self._received[0][0] if self._received else 0

    def received_at(self) -> float | None:
        """Return time.monotonic() when the first signal arrived; None if none has."""
        return self._received[0][1] if self._received else None


signals = _StopSignals()
# Only in a rank: other programs import this file too, and handle signals in their own way.
if _this.run_dir and "RANK" in os.environ and threading.current_thread() is threading.main_thread():
    signals.install(signal.Signals[os.environ.get("TORCHRELAY_STOP_SIGNAL", "SIGTERM")])


def _warn(text: str) -> None:
    print(f"relay: rank {_this.rank}: {text}", file=sys.stderr, flush=True)


def _check_is_newest() -> None:
    """Raise RuntimeError if a later attempt has begun elsewhere, because Slurm could not end this node."""
    if _this.run_dir is None or not (events := _this.run_dir / "events").is_dir():
        return
    os.close(os.open(events, os.O_RDONLY))  # NFS caches for up to a minute that a file is missing
    if (events / f"attempt-{_this.attempt + 1:03d}-node-00.jsonl").exists():
        raise RuntimeError(f"attempt {_this.attempt + 1} has begun: attempt {_this.attempt} writes nothing more")


# --- what other programs read ---


class Heartbeat:
    """A rank's sign of life: a JSON object in a file that the node's agent reads, rewritten in place.

    It says what the rank is doing, and how fast it is. A beat is one write into memory. If that fails, one beat is
    missing and the training continues.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._step = 0
        self._path = path
        self.step_seconds: float | None = None
        """Mean wall time of recent steps."""
        self.busy_seconds: float | None = None
        """Mean time of this rank's own work in recent steps."""

    def beat(self, phase: Phase, step: int | None = None) -> None:
        """Write what begins now and the optimizer steps done, by default as in the previous beat."""
        if self._path is None:
            return
        self._count += 1
        self._step = self._step if step is None else step
        record = {
            "rank": self._rank, "pid": os.getpid(), "step": self._step, "phase": phase, "count": self._count,
            "time": time.time(), "step_seconds": self.step_seconds, "busy_seconds": self.busy_seconds,
        }  # fmt: skip
        with suppress(OSError):
            # At each beat: a script may close files that it does not know, and something may have emptied /dev/shm.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, json.dumps(record).encode().ljust(_HEARTBEAT_BYTES), 0)
            finally:
                os.close(descriptor)


class _Reports:
    """The heartbeat of this rank, and what rank 0 writes for `hpc status`, `hpc report` and trackers."""

    def __init__(self) -> None:
        self._heartbeat = Heartbeat(_this.heartbeat, _this.rank)
        self._beaten_at: float | None = None
        self._failed = False

    def beat(self, step: int | None = None) -> None:
        """Show that this rank lives: the node's agent notices a hang."""
        now, mean = time.monotonic(), self._heartbeat.step_seconds
        if self._beaten_at is not None:
            seconds = now - self._beaten_at
            self._heartbeat.step_seconds = seconds if mean is None else 0.9 * mean + 0.1 * seconds
        self._beaten_at = now
        self._heartbeat.beat("script", step)

    def metrics(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Append a line to the metrics of the training."""
        line = {"step": step, **numbers, "world_size": _this.world_size, "attempt": _this.attempt, "time": time.time()}
        self._append("metrics/train.jsonl", line)

    def event(self, name: str, **fields: Any) -> None:
        """Append to the ledger of the run, on rank 0."""
        record = {"time": time.time(), "event": name, "attempt": _this.attempt, **fields}
        self._append(f"events/attempt-{_this.attempt:03d}-script.jsonl", record)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if _this.run_dir is None or _this.rank != 0:
            return
        path = _this.run_dir / name
        try:
            _check_is_newest()
            path.parent.mkdir(exist_ok=True)
            with path.open("a+b") as file:
                # A kill may have left half a line. A line break keeps it from spoiling the next one.
                is_torn = file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
                file.write(b"\n" * is_torn + json.dumps(record, default=str).encode() + b"\n")
        except OSError as error:
            if not self._failed:
                _warn(f"{path} cannot be written ({error}): free some space; the training continues without it")
            self._failed = True


_reports = _Reports()


def report(*, step: int, **numbers: Any) -> None:
    """Say how far the training is: for `hpc status`, `hpc report`, trackers, and so that a hang is noticed.

    Each rank that calls it shows that it lives; rank 0 writes the numbers.

    Args:
        step: the optimizer steps done.
        numbers: such as `loss`, `images_per_second`, `epoch`, `lr`; tensors of one element too, for which a GPU waits.
    """
    _reports.beat(step)
    if _this.rank == 0 and numbers:
        _reports.metrics(step, {name: _number(value) for name, value in numbers.items()})


def _number(value: Any) -> float | None:
    """A number as JSON has it: none is infinite."""
    plain = value.item() if hasattr(value, "item") else value
    return plain if math.isfinite(plain) else None


# --- the ranks together ---


class PendingMaximum:
    """The maximum of each of some numbers over all ranks, which they find on the CPU while they go on training."""

    def __init__(self, group: "ProcessGroup | None") -> None:
        self._group = group
        self._pending: tuple[torch.Tensor, Any] | None = None

    def start(self, numbers: Iterable[int]) -> None:
        """Send this rank's numbers. All ranks must call this; the one before must have been waited for."""
        import torch
        from torch import distributed

        maximum = torch.tensor(tuple(numbers))
        work = distributed.all_reduce(maximum, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = maximum, work

    def wait(self) -> list[int]:
        """Return the maximum of what the ranks have sent; empty if they have sent nothing since the last call."""
        if self._pending is None:
            return []
        maximum, work = self._pending
        self._pending = None
        work.wait()
        found: list[int] = maximum.tolist()
        return found


def all_gather_bytes(data: bytes, group: "ProcessGroup | None") -> list[bytes]:
    """Return the bytes of every rank, by rank. All ranks must call this; without a group, this is the only one.

    torch's all_gather_object unpickles what it receives: a process that poses as a rank would run code on all. The
    connections between ranks are not authenticated.
    """
    import torch
    from torch import distributed

    if group is None:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(1, *(int(size) for size in sizes))
    own, *texts = (bytearray(longest) for _ in range(1 + len(sizes)))
    own[: len(data)] = data
    # Not through numpy, which the environment of a user's script may lack.
    received = [torch.frombuffer(text, dtype=torch.uint8) for text in texts]
    distributed.all_gather(received, torch.frombuffer(own, dtype=torch.uint8), group=group)
    return [bytes(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]


def broadcast_bytes(data: bytes | None, source: int, group: "ProcessGroup | None") -> bytes:
    """Return the bytes of rank `source` on every rank; the argument of other ranks is ignored."""
    import torch
    from torch import distributed

    if group is None:
        return data or b""
    size = torch.tensor([len(data) if data is not None else 0])
    distributed.broadcast(size, source, group=group)
    mine = bytearray(data) if distributed.get_rank() == source and data is not None else bytearray(int(size))
    if mine:
        distributed.broadcast(torch.frombuffer(mine, dtype=torch.uint8), source, group=group)
    return bytes(mine)


class _Ranks:
    """All ranks together: what one of them wants, all do at the same call."""

    def __init__(self) -> None:
        self.group: Any = None
        """The ranks' process group on the CPUs; None: this is the only rank."""
        self._maximum: PendingMaximum | None = None

    def connect(self, call: str) -> None:
        """Make the process group, once. Raises RuntimeError if the script has none yet."""
        from torch import distributed

        if _this.world_size == 1 or self.group is not None:
            return
        if not distributed.is_initialized():
            raise RuntimeError(f"{call} needs the other ranks: call it after torch.distributed.init_process_group()")
        self.group = distributed.new_group(backend="gloo")
        self._maximum = PendingMaximum(self.group)

    def agree(self, wanted: list[int]) -> list[int]:
        """Return the maximum of each number over the ranks, of the call before: so no rank waits for another one."""
        if self._maximum is None:
            return wanted
        agreed = self._maximum.wait() or [0] * len(wanted)
        # What was agreed on happens now: it must not happen twice.
        self._maximum.start(0 if done else want for done, want in zip(agreed, wanted, strict=True))
        return agreed

    def settle(self) -> None:
        """End the exchange that is under way."""
        if self._maximum:
            self._maximum.wait()

    def close(self) -> None:
        """Let go of the process group. At exit, before Python takes itself apart: its threads would abort then."""
        self._maximum = self.group = None


_ranks = _Ranks()
atexit.register(_ranks.close)
_stopping: tuple[int, float] | None = None
_active: "SavedState | None" = None


def should_stop() -> bool:
    """Whether to save and exit with 0: True on all ranks at the same call, a step after one of them got a signal.

    All ranks call it equally often, after each step. Within `with state(...)`, that is also when snapshots are taken.

    Raises:
        RuntimeError: there are several ranks, and torch.distributed is not initialized yet.
    """
    global _stopping  # noqa: PLW0603 - of one process
    if _this.run_dir is None or _stopping:
        return _stopping is not None
    _ranks.connect("should_stop()")
    _reports.beat(_active.step if _active else None)
    wanted = [signals.received(), *(_active.due() if _active else (0, 0))]
    stop, checkpoint, snapshot = _ranks.agree(wanted)
    if stop:
        _ranks.settle()
        _stopping = stop, signals.received_at() or time.monotonic()
    elif _active and (checkpoint or snapshot):
        _active.save(durable=bool(checkpoint))
    return _stopping is not None


# --- saved states ---


class BackgroundWriter:
    """Runs writes in a thread, one at a time and in order. The thread calls `prepare` when it begins."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer", initializer=prepare)
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Start a write, once the previous one is done. Raises what that raised."""
        self.wait()
        self._pending = self._thread.submit(write)

    def enqueue(self, write: Callable[[], None]) -> None:
        """Start a write after the previous one, without waiting for that. If that fails, this one fails too."""
        previous = self._pending

        def run() -> None:
            if previous:
                previous.result()
            write()

        self._pending = self._thread.submit(run)

    @property
    def busy(self) -> bool:
        """Whether a write is running."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait for all writes. Raises what the last one raised. Any thread may call this."""
        if pending := self._pending:
            pending.result()


def state(
    *, checkpoint_seconds: float = 600.0, snapshot_seconds: float = 1.0, keep: int = 2, **objects: Saveable
) -> "SavedState":
    """Keep these objects over interruptions. All ranks enter and leave the `with` block together.

    Entering restores the newest state that any rank can reach; `saved.step` says how many steps are done, and the loop
    counts it up. `should_stop()` takes the snapshots and checkpoints that are due; leaving without an exception saves
    the last step. Modules, optimizers and schedulers are the same on all ranks (DDP), or in shards (FSDP2). Of
    everything else, such as a loader, each rank saves its own; and of the random number generators of torch and Python.

    Args:
        checkpoint_seconds: between checkpoints in the run directory.
        snapshot_seconds: between snapshots in the memory of each node, from which the ranks go on when one of them has
            died; longer where they would take more than 1 % of the time. 0: none.
        keep: how many checkpoints to keep.
        objects: each has `state_dict` and `load_state_dict`; the same names in every attempt.
    """
    return SavedState(objects, checkpoint_seconds, snapshot_seconds, keep)


class SavedState:
    """The objects that `state` keeps, while its block runs."""

    step: int
    """The optimizer steps done."""

    def __init__(
        self, objects: dict[str, Saveable], checkpoint_seconds: float, snapshot_seconds: float, keep: int
    ) -> None:
        self.step = 0
        self._objects = objects
        self._intervals = checkpoint_seconds, snapshot_seconds
        self._keep = keep
        self._saved_at = [time.monotonic()] * 2
        self._saved_steps = [-1, -1]
        self._cost_seconds = 0.0
        self._background = BackgroundWriter()
        self._snapshots = _this.snapshots if snapshot_seconds else None
        self._first_step: int | None = None
        self._unwritten: OSError | None = None

    def __enter__(self) -> Self:
        """Restore the newest state, if there is one.

        Raises:
            RuntimeError: there are several ranks, and torch.distributed is not initialized yet. Or a later attempt
                has begun.
            TypeError: a state holds what could not be restored.
            KeyError: the saved state is of other objects.
        """
        global _active  # noqa: PLW0603 - of one process
        if _this.run_dir is None:
            return self
        _ranks.connect("state()")
        began = time.monotonic()
        _check_is_newest()
        _check_restorable(self._objects)
        source = _restore(self._objects)
        self.step = source.step if source else 0
        self._saved_steps = [self.step if source and source.durable else -1, self.step]
        self._first_step = self.step
        _reports.beat(self.step)
        _reports.event(
            "train_started",
            step=self.step, world_size=_this.world_size, restored_from=source and str(source.path),
            source=source and source.source,
            restore_seconds=round(time.monotonic() - began, 3),
        )  # fmt: skip
        _active = self
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Save the last step, also at sys.exit(0); nothing after an error. Raises OSError if it cannot be written."""
        global _active  # noqa: PLW0603 - of one process
        _active = None
        is_done = error is None or (isinstance(error, SystemExit) and error.code in {None, 0})
        if _this.run_dir is not None and is_done:
            _ranks.settle()
            self.save(durable=True)
            self._background.wait()
            if self._unwritten:
                raise self._unwritten
            if _stopping:
                number, at = _stopping
                seconds = round(time.monotonic() - at, 3)
                _reports.event("train_stopped", step=self.step, signal=signal.Signals(number).name, seconds=seconds)

    def due(self) -> tuple[int, int]:
        """Return whether a checkpoint, and a snapshot, are due: 1 or 0. The clock of rank 0 decides."""
        if self._first_step is not None and self.step > self._first_step:
            _reports.event("first_step", step=self.step)
            self._first_step = None
        if _this.rank != 0 or self._background.busy:
            return 0, 0
        checkpoint_seconds, snapshot_seconds = self._intervals
        waits = checkpoint_seconds, max(snapshot_seconds, _SECONDS_PER_COST * self._cost_seconds)
        late = [time.monotonic() - at >= wait for at, wait in zip(self._saved_at, waits, strict=True)]
        return int(late[0]), int(late[1] and self._snapshots is not None)

    def save(self, *, durable: bool) -> None:
        """Save this step, unless it is saved already. All ranks call it together.

        What cannot be written is no error yet: a checkpoint is tried again when the next one is due, and at the end.
        """
        kind, began = 0 if durable else 1, time.monotonic()
        self._saved_at[kind] = began
        if self._saved_steps[kind] == self.step:
            return
        self._saved_steps[kind] = self.step
        content = _capture(self._objects, self.step)
        copy_seconds = time.monotonic() - began
        self._cost_seconds = max(0.9 * self._cost_seconds, copy_seconds)
        directory = _this.checkpoints if durable else self._snapshots
        if directory and (durable or not self._background.busy):
            write = partial(self._write, directory, self.step, content, copy_seconds, durable=durable)
            self._background.submit(write)

    def _write(
        self, directory: Path, step: int, content: Mapping[str, Any], copy_seconds: float, *, durable: bool
    ) -> None:
        began, thread_began = time.monotonic(), time.thread_time()
        try:
            _write_state(directory, step, _serialized(content), keep=self._keep if durable else None)
        except OSError as error:
            if durable:
                self._unwritten, self._saved_steps[0] = error, -1
                _reports.event("checkpoint_failed", step=step, reason=str(error))
                _warn(f"the checkpoint of step {step} could not be written, and is tried again later: {error}")
            else:
                self._snapshots = None
                _warn(f"no more snapshots: {error}; an interruption now costs the steps since the last checkpoint")
            return
        if durable:
            self._unwritten, seconds = None, round(time.monotonic() - began, 3)
            _reports.event("checkpoint_saved", step=step, seconds=seconds, copy_seconds=round(copy_seconds, 4))
        else:
            # Where the ranks compute on CPUs, this thread takes time from them.
            self._cost_seconds = max(self._cost_seconds, time.thread_time() - thread_began)


def _write_state(directory: Path, step: int, data: bytes, *, keep: int | None) -> None:
    """Write a checkpoint or, if `keep` is None, a snapshot. Raises OSError."""
    check = _check_is_newest
    if keep is None:
        keep, check = KEPT_SNAPSHOTS, lambda: None
        directory.mkdir(parents=True, exist_ok=True)
        count = KEPT_SNAPSHOTS + 1  # one is being written
        if shutil.disk_usage(directory).free < (count - len(list_checkpoints(directory))) * len(data):
            raise OSError(f"{directory} has no space for {count} snapshots of {len(data) / 1e6:,.1f} MB")

    def write_file(temporary: Path) -> dict[str, Any]:
        (temporary / _STATE_FILE).write_bytes(data)
        return {_STATE_FILE: describe_bytes(data)}

    save_checkpoint(directory, step, write_file, keep, 0o700, check=check)


def _capture(objects: Mapping[str, Saveable], step: int) -> dict[str, Any]:
    """Copy all states into memory that the training does not touch. All ranks call it together."""
    writes = _this.local_rank == 0
    shared = {name: _copied(each.state_dict(), keep=writes) for name, each in objects.items() if _is_shared(each)}
    own = {name: each.state_dict() for name, each in objects.items() if not _is_shared(each)}
    every = all_gather_bytes(_serialized({"objects": own, "random": _random_states()}), _ranks.group)
    return {"step": step, "world_size": _this.world_size, "shared": shared, "own": every}


def _is_shared(one: Saveable) -> bool:
    """Return whether all ranks have the same state, or shards of one."""
    from torch import nn, optim

    return isinstance(one, nn.Module | optim.Optimizer | optim.lr_scheduler.LRScheduler)


def _copied(value: Any, *, keep: bool) -> Any:
    """Copy the tensors in a state to the host's memory. All ranks put shards together, and only some `keep` them."""
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.detach().to("cpu", copy=True) if keep else None
    if isinstance(value, dict):
        return {key: _copied(each, keep=keep) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(each, keep=keep) for each in value)
    return value


def _random_states() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _restore_random(states: Mapping[str, Any]) -> None:
    import torch

    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _serialized(content: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _deserialized(data: bytes) -> Any:
    """Return what `_serialized` was given. Code in it is not run, but refused."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _check_restorable(objects: Mapping[str, Saveable]) -> None:
    """Refuse, before the first step, a state that could be saved and not restored."""
    from pickle import UnpicklingError

    from torch import nn

    for name, each in objects.items():
        if isinstance(each, nn.Module):
            continue
        try:
            _deserialized(_serialized(_copied(each.state_dict(), keep=True)))
        except UnpicklingError as error:
            raise TypeError(
                f"state({name}=...): its state_dict() holds more than tensors, numbers and texts, so it could not be "
                f"restored: {error}"
            ) from error


# --- directories of files: whole or absent ---


def publish_directory(
    path: Path, write_files: WriteFiles, mode: int | None = None, *, check: Callable[[], None] | None = None
) -> None:
    """Create or replace a directory of files. The old directory is deleted only after the new one has its name.

    `write_files` receives the empty directory, and need not flush what it writes. The directory gets `mode`, its files
    get it without the execute bits. None: the umask decides. `check` is called once everything is written,
    which may take minutes; if it raises, nothing is published.

    Raises:
        OSError: such as a full disk. The old directory is unchanged, and no temporary one remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path, _UNFINISHED)
    try:
        temporary.mkdir(mode=0o777 if mode is None else mode)
        write_files(temporary)
        for file in temporary.iterdir():
            if mode is not None:
                file.chmod(mode & 0o666)
            _fsync(file)
        _fsync(temporary)
        if check:
            check()
        # A directory cannot be renamed onto one that has entries.
        old = _temporary_name(path, _REPLACED) if path.exists() else None
        if old:
            path.rename(old)
        temporary.rename(path)
        _fsync(path.parent)
        if old:
            shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _temporary_name(path: Path, ending: str) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.{ending}"


def _fsync(path: Path) -> None:
    """Make a file's content durable, or the names in a directory: a rename is on the disk only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot for directories, of which `hpc submit` has warned.
        if error.errno not in _UNSUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def remove_published(path: Path) -> None:
    """Remove a published directory. It is renamed first, so a kill leaves no incomplete directory under its name.

    Ignores errors. After a kill, `remove_unpublished` removes the rest.
    """
    with suppress(OSError):
        path = path.rename(_temporary_name(path, _UNFINISHED))
    shutil.rmtree(path, ignore_errors=True)


def remove_unpublished(parent: Path, pattern: str) -> None:
    """Remove temporary directories of killed processes; restore a directory that was renamed but not replaced.

    `pattern` matches the names that are published in `parent`, such as `step-*`. `parent` need not exist.
    """
    for old in sorted(parent.glob(f".{pattern}.*.{_REPLACED}")):
        path = parent / old.name[1:].rsplit(".", 2)[0]
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)
    for unfinished in parent.glob(f".{pattern}.*.{_UNFINISHED}"):
        shutil.rmtree(unfinished, ignore_errors=True)


# --- checkpoints, and snapshots: `step-00001200/`, with a manifest ---


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the optimizer steps done, from the name of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def list_checkpoints(directory: Path) -> list[Path]:
    """Return all checkpoints, intact or not; the newest (by its step) first. Ignores other names, such as of copies."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


def save_checkpoint(
    directory: Path, step: int, write_files: WriteFiles, keep: int | None, mode: int | None = None,
    *, check: Callable[[], None] | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint and, once it is on the disk, delete all but the newest `keep`; None: delete nothing.

    `write_files` receives the checkpoint's directory, which gets the mode `mode`. It may return the manifest's entries
    for files that others have written and checked. `check` raises if the checkpoint may not be published.

    Raises:
        OSError: it could not be written; the older ones are all there.
    """

    def complete(temporary: Path) -> None:
        files = write_files(temporary) or {}
        files |= {file.name: describe_file(file) for file in sorted(temporary.iterdir()) if file.name not in files}
        (temporary / _MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2))

    path = checkpoint_path(directory, step)
    publish_directory(path, complete, mode, check=check)
    if keep is not None:
        for outdated in list_checkpoints(directory)[keep:]:
            remove_published(outdated)
        for rejected in directory.glob(f"{_REJECTED}*"):
            shutil.rmtree(rejected, ignore_errors=True)
    return path


def reject(path: Path) -> None:
    """Mark a checkpoint that is torn or altered as unusable. It is deleted once a new one is committed."""
    path.rename(path.with_name(_REJECTED + path.name))


def describe_file(path: Path) -> dict[str, Any]:
    """Return the manifest's entry for a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def describe_bytes(data: bytes) -> dict[str, Any]:
    """Return the manifest's entry for a file with this content."""
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def find_damage(path: Path, first: int = 0, stride: int = 1) -> str:
    """Return what is wrong with a checkpoint; empty if its files are as they were written.

    With its rank as `first` and the world size as `stride`, a rank checks its share of the files.

    Raises:
        OSError: the storage cannot be read. The checkpoint may be intact.
    """
    return _damage(path, describe_file, first, stride)


def _damage(path: Path, describe: Callable[[Path], dict[str, Any]], first: int = 0, stride: int = 1) -> str:
    try:
        files = json.loads((path / _MANIFEST).read_bytes())["files"]
        checked = sorted(files.items())[first::stride]
        damaged = next((name for name, entry in checked if describe(path / name) != entry), None)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it does not match its manifest: {error!r}"
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error}): start the run again when it can") from error
    return f"{damaged} is not as it was written" if damaged else ""


def file_names(path: Path) -> list[str]:
    """Return the names of the files of an intact checkpoint. Raises OSError if the storage cannot be read."""
    return list(json.loads((path / _MANIFEST).read_bytes())["files"])


def read_checkpoint(path: Path) -> dict[str, bytes] | str:
    """Return the files of a checkpoint, or what is wrong with it. Raises OSError if the storage cannot be read."""
    files = dict[str, bytes]()

    def read(file: Path) -> dict[str, Any]:
        files[file.name] = data = file.read_bytes()
        return describe_bytes(data)

    return _damage(path, read) or files


# --- restoring: one rank reads, and gives the others what it has read ---


@dataclass(frozen=True, kw_only=True, order=True)
class Candidate:
    """A saved state that a rank can read. Tried first: the newest, and a checkpoint before a snapshot."""

    step: int
    durable: bool
    rank: int = field(compare=False)
    path: Path = field(compare=False)

    @property
    def source(self) -> str:
        """The kind of state."""
        return "checkpoint" if self.durable else "snapshot"


def find_candidates(rank: int, checkpoints: Path | None, snapshots: Path | None) -> list[Candidate]:
    """Return the states in the directories of a rank, the newest last. Removes what killed processes have left."""
    found = list[Candidate]()
    for durable, directory in ((True, checkpoints), (False, snapshots)):
        if directory:
            remove_unpublished(directory, "step-*")
            paths = list_checkpoints(directory)
            found += [Candidate(step=step_of(path), durable=durable, rank=rank, path=path) for path in paths]
    return sorted(found)


def restore_newest(
    mine: list[Candidate], load: Callable[[Candidate], bool], group: "ProcessGroup | None"
) -> Candidate | None:
    """Load the newest state that is usable, and return it; None: there is none. All ranks must call this.

    `mine` is what this rank can read, the newest last. `load`, on all ranks, loads a state of one of them; it returns
    False on all of them if the state is not usable.
    """
    while True:
        text = json.dumps(vars(mine[-1]) if mine else None, default=str)
        newest = [json.loads(each) for each in all_gather_bytes(text.encode(), group)]
        found = (Candidate(**{**each, "path": Path(each["path"])}) for each in newest if each)
        best = max(found, default=None)
        if best and mine and best.rank == mine[-1].rank:
            mine.pop()
        if best is None or load(best):
            return best


def remove_newer(directory: Path, step: int) -> None:
    """Remove the snapshots that are newer than the restored step, and all unfinished ones."""
    remove_unpublished(directory, "step-*")
    for path in list_checkpoints(directory):
        if step_of(path) > step:
            remove_published(path)


def _restore(objects: Mapping[str, Saveable]) -> Candidate | None:
    """Load the newest state that is intact. All ranks call it together."""

    def load(candidate: Candidate) -> bool:
        data = _read(candidate.path, durable=candidate.durable) if candidate.rank == _this.rank else None
        if data := broadcast_bytes(data, candidate.rank, _ranks.group):
            _load(objects, _deserialized(data))
        return bool(data)

    restored = restore_newest(find_candidates(_this.rank, _this.checkpoints, _this.snapshots), load, _ranks.group)
    if restored and _this.snapshots:
        remove_newer(_this.snapshots, restored.step)
    return restored


def _read(path: Path, *, durable: bool) -> bytes:
    """Return the file of a state; empty if that is damaged, and is not tried again.

    Raises OSError if a checkpoint cannot be read: it may be intact.
    """
    try:
        files = read_checkpoint(path)
    except OSError as error:
        if durable:
            raise
        files = str(error)
    if not isinstance(files, str) and _STATE_FILE in files:
        return files[_STATE_FILE]
    _warn(f"{path} is not used: {files if isinstance(files, str) else f'it has no {_STATE_FILE}'}")
    if durable:
        reject(path)
    else:
        remove_published(path)
    return b""


def _load(objects: Mapping[str, Saveable], content: Mapping[str, Any]) -> None:
    """Give the objects a saved state. Raises KeyError if it is that of other objects."""
    every = content["own"]
    # With more ranks than then, some of them continue as others do.
    own = _deserialized(every[_this.rank % len(every)])
    states = {**content["shared"], **own["objects"]}
    if states.keys() != objects.keys():
        raise KeyError(
            f"the saved state is of {', '.join(sorted(states))}, and state() got {', '.join(sorted(objects))}"
        )
    for name, each in objects.items():
        each.load_state_dict(_in_shards(each, states[name]))
    _restore_random(own["random"])


def _in_shards(one: Saveable, content: dict[str, Any]) -> dict[str, Any]:
    """Return the state with its tensors in shards where the object has its parameters in shards (FSDP2)."""
    from torch import nn, optim

    if isinstance(one, nn.Module):
        current = one.state_dict()
        return {name: _like(current.get(name), value) for name, value in content.items()}
    if not isinstance(one, optim.Optimizer):
        return content
    parameters = [each for group in one.param_groups for each in group["params"]]
    values = {
        index: {name: _like(parameters[int(index)], value) for name, value in each.items()}
        for index, each in content["state"].items()
    }
    return {**content, "state": values}


def _like(model: Any, value: Any) -> Any:
    """Return a whole tensor in shards like `model`, if that is in shards and of its shape."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(model, DTensor) or not isinstance(value, torch.Tensor) or value.shape != model.shape:
        return value
    return distribute_tensor(value.to(model.device), model.device_mesh, model.placements)
