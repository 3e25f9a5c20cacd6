"""Metrics as JSON lines and for TensorBoard. Runs on rank 0.

A resumed run first removes the lines of steps after the restored one, so the files have neither gaps nor repetitions.
While the disk is full, lines wait in memory.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc.core.files import append_json_line, json_line, read_json_lines, write_atomic
from hpc.core.rundir import RunDir
from training.runtime.console import Console
from training.runtime.train_progress import Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Record = dict[str, Any]


def keep_only(path: Path, wanted: Callable[[Record], bool]) -> None:
    """Rewrite a file of JSON lines without unwanted and torn lines."""
    kept = "".join(json_line(record) for record in read_json_lines(path) if wanted(record))
    if path.exists() and kept.encode() != path.read_bytes():
        write_atomic(path, kept)


class JsonLines:
    """Appends to a file of JSON lines. Lines that a full disk refuses are written later."""

    def __init__(self, path: Path, console: Console) -> None:
        self._path = path
        self._console = console
        self._waiting: list[Record] = []

    def append(self, record: Record) -> None:
        """Append a record, after those that did not fit earlier."""
        self._waiting.append(record)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while self._waiting:
                append_json_line(self._path, self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            self._console.warn(f"{self._path} cannot be written ({error}): free some space; its lines wait in memory")


class Metrics:
    """All metrics of a run, written from the restored step on."""

    def __init__(self, run_dir: RunDir, attempt: int, progress: Progress, console: Console) -> None:
        keep_only(run_dir.train_metrics, lambda record: record["step"] <= progress.step)
        keep_only(run_dir.eval_metrics, lambda record: _is_evaluated(record, progress))
        self._attempt = attempt
        self._console = console
        self._train = JsonLines(run_dir.train_metrics, console)
        self._evaluations = JsonLines(run_dir.eval_metrics, console)
        self._directory, self._first_step = run_dir.tensorboard, progress.step + 1
        self._tensorboard: SummaryWriter | None = None
        self._tensorboard_works = True

    def log_train(self, record: Record) -> None:
        """Write the metrics of a logged step."""
        self._train.append({**record, "attempt": self._attempt, "time": time.time()})
        self._add_scalars("train", record, ("loss", "lr", "images_per_second"))

    def log_evaluation(self, record: Record) -> None:
        """Write the metrics of an evaluation."""
        self._evaluations.append({**record, "attempt": self._attempt, "time": time.time()})
        self._add_scalars(record["split"], record, ("loss", "accuracy"))

    def _add_scalars(self, group: str, record: Record, names: tuple[str, ...]) -> None:
        if not self._tensorboard_works:
            return
        try:
            # Opened at the first metrics: all ranks would wait for the import before their first step.
            self._tensorboard = self._tensorboard or _open_tensorboard(self._directory, self._first_step)
            for name in names:
                self._tensorboard.add_scalar(f"{group}/{name}", record[name], record["step"])
            self._tensorboard.flush()
        except OSError as error:
            self._console.warn(f"TensorBoard's file cannot be written ({error}): the training continues without it")
            self._tensorboard_works = False

    def close(self) -> None:
        """Flush buffers."""
        if self._tensorboard and self._tensorboard_works:
            with suppress(OSError):
                self._tensorboard.close()


def _open_tensorboard(directory: Path, first_step: int) -> "SummaryWriter":
    """The writer of TensorBoard's files. TensorBoard hides what an earlier attempt wrote from `first_step` on."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # half a second, and only for rank 0

    return SummaryWriter(str(directory), purge_step=first_step)


def _is_evaluated(record: Record, progress: Progress) -> bool:
    """Whether the restored state includes this validation; a test is repeated until `final/` exists."""
    return bool(record["split"] == "val" and record["epoch"] <= progress.evaluated_epochs)
