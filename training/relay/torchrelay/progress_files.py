"""Writes a rank's heartbeat, and the metrics and events of a script. Runs on every rank; imports no torch.

The node agent reads the heartbeat; `hpc status`, `hpc report` and trackers read the metrics and events.
"""

import json
import math
import os
import reprlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from .this_rank import THIS_RANK, check_no_later_attempt, check_version, warn

# A heartbeat is padded with spaces to this size, so that a reader always finds one whole record.
_HEARTBEAT_BYTES = 512
# Each record of a snapshot is a file on shared storage.
_SNAPSHOT_SECONDS = 5.0

Phase = Literal["start", "load", "step", "evaluate", "save", "end", "script"]


class Heartbeat:
    """A rank's sign of life: a JSON object with its phase, step and speed, in a file that the node agent reads.

    A beat rewrites the file, which is in memory. If the write fails, the training continues without this beat.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._step = 0
        self._path = path
        self.step_seconds: float | None = None
        """Mean seconds per recent step; None before the first step."""
        self.busy_seconds: float | None = None
        """Mean seconds of this rank's own work in recent steps; None before the first step, and in a script."""

    def beat(self, phase: Phase, step: int | None = None) -> None:
        """Write the phase that begins now, and the optimizer steps done. `None` repeats the step of the last beat."""
        if self._path is None:
            return
        self._count += 1
        self._step = self._step if step is None else step
        record = {
            "rank": self._rank, "pid": os.getpid(), "step": self._step, "phase": phase, "count": self._count,
            "time": time.time(), "step_seconds": self.step_seconds, "busy_seconds": self.busy_seconds,
        }  # fmt: skip
        with suppress(OSError):
            # Reopen the file for each beat: a script may close descriptors, and something may have emptied /dev/shm.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, json.dumps(record).encode().ljust(_HEARTBEAT_BYTES), 0)
            finally:
                os.close(descriptor)


class ProgressFiles:
    """Writes the heartbeat of a script's rank, and on rank 0 the metrics and events of the script."""

    def __init__(self) -> None:
        self._heartbeat = Heartbeat(THIS_RANK.heartbeat, THIS_RANK.rank)
        self._beaten_at: float | None = None
        # None after the first step.
        self._restored_step: int | None = -1
        self._failed = False
        self._snapshot_at = -math.inf
        self._warned = set[str]()
        """The names of the values about which the rank has printed a warning."""

    def begin(self, step: int) -> None:
        """Show that this rank is alive and has restored a state after `step` steps."""
        self._restored_step = step
        self.beat(step)

    def beat(self, step: int | None = None) -> None:
        """Show the node agent that this rank is alive. The time from one call to the next counts as a step.

        After the first step since the start of the ranks, this also records the event `first_step`.
        """
        if step is not None and self._restored_step is not None and step > self._restored_step:
            self._restored_step = None
            self.event("first_step", step=step)
        now, mean = time.monotonic(), self._heartbeat.step_seconds
        if self._beaten_at is not None:
            seconds = now - self._beaten_at
            self._heartbeat.step_seconds = seconds if mean is None else 0.9 * mean + 0.1 * seconds
        self._beaten_at = now
        self._heartbeat.beat("script", step)

    def snapshot(self, step: int, node_bytes: int) -> None:
        """Record the newest snapshot for `hpc status`, but not more often than every few seconds."""
        if THIS_RANK.run_dir is None or time.monotonic() - self._snapshot_at < _SNAPSHOT_SECONDS:
            return
        self._snapshot_at = time.monotonic()
        path = THIS_RANK.run_dir / "metrics" / "snapshot.json"
        with suppress(OSError):  # the training continues without it
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps({"step": step, "node_bytes": node_bytes, "time": time.time()}))
            temporary.replace(path)

    def report(self, step: Any, values: Mapping[str, Any]) -> None:
        """Beat and, on rank 0, append a line to the run's metrics.

        A value that is no number or tensor of one element is left out, with one warning for each name: a report never
        ends a training, except if this package is not the run's (OtherVersionError).
        """
        if THIS_RANK.run_dir is None:
            return
        check_version()
        whole = self._checked("step", step, _whole)
        self.beat(None if whole is _WRONG else whole)
        if THIS_RANK.rank != 0 or not values or whole is _WRONG:
            return
        where = {"world_size": THIS_RANK.world_size, "attempt": THIS_RANK.attempt, "time": time.time()}
        checked = {
            name: self._checked(name, value, _refuse if name in where else _json_number)
            for name, value in values.items()
        }
        numbers = {name: number for name, number in checked.items() if number is not _WRONG}
        self._append("metrics/train.jsonl", {"step": whole, **numbers, **where})

    def _checked(self, name: str, value: Any, convert: Callable[[Any], Any]) -> Any:
        """Return the converted value, or _WRONG if this fails. The first failure of a name prints a warning."""
        try:
            return convert(value)
        except Exception as error:  # noqa: BLE001 - the value may be of any class
            if name not in self._warned:
                self._warned.add(name)
                shown = " ".join(reprlib.repr(value).split())
                left_out = "this report" if name == "step" else name
                warn(f"report({name}={shown}): {error}; {left_out} is left out, and the training continues")
            return _WRONG

    def event(self, name: str, **fields: Any) -> None:
        """Append an event to the run's ledger, on rank 0."""
        record = {"time": time.time(), "event": name, "attempt": THIS_RANK.attempt, **fields}
        self._append(f"events/attempt-{THIS_RANK.attempt:03d}-script.jsonl", record)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if THIS_RANK.run_dir is None or THIS_RANK.rank != 0:
            return
        path = THIS_RANK.run_dir / name
        try:
            check_no_later_attempt()
            path.parent.mkdir(exist_ok=True)
            with path.open("a+b") as file:
                # A kill may have left half a line, which must not become a part of this one.
                is_torn = file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
                file.write(b"\n" * is_torn + json.dumps(record, default=str).encode() + b"\n")
        except OSError as error:
            if not self._failed:
                warn(f"{path} cannot be written ({error}); the training continues without it")
            self._failed = True


_WRONG = object()
"""What stands for a value that cannot be reported."""


def _json_number(value: Any) -> float | None:
    """Return a value as a number for JSON; None if it is None or not finite. The host waits for a tensor on a GPU."""
    plain = value.item() if hasattr(value, "item") else value
    if plain is None or not math.isfinite(plain):
        return None
    return int(plain) if isinstance(plain, int) else float(plain)


def _refuse(_value: Any) -> None:
    raise ValueError("torchrelay writes this number itself, so use another name")


def _whole(value: Any) -> int:
    number = _json_number(value)
    if number is None or number != int(number):
        raise ValueError("the step must be a whole number")
    return int(number)


progress_files = ProgressFiles()
