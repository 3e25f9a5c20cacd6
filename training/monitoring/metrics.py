"""Metrics: JSON lines and TensorBoard. Runs on rank 0.

A resumed run first takes back what was written after the state that it resumes, so the files have neither gaps nor
repetitions. A full disk costs no lines: they are kept and written when there is room.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc.core.files import append_json_line, json_line, read_json_lines, write_atomic
from hpc.core.rundir import RunDir
from training.runtime.console import Console
from training.runtime.progress import Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Record = dict[str, Any]


def keep_only(path: Path, wanted: Callable[[Record], bool]) -> None:
    """Rewrite a file of JSON lines, whole, without the unwanted and the torn lines."""
    kept = "".join(json_line(record) for record in read_json_lines(path) if wanted(record))
    if path.exists() and kept.encode() != path.read_bytes():
        write_atomic(path, kept)


class JsonLines:
    """A file of JSON lines that outlives a full disk."""

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
            self._console.warn(f"{self._path} cannot be written ({error}): free some space; its lines are kept")


class Metrics:
    """All metrics of a run, from the state on that it resumes."""

    def __init__(self, run_dir: RunDir, attempt: int, progress: Progress, console: Console) -> None:
        keep_only(run_dir.train_metrics, lambda record: record["step"] <= progress.step)
        keep_only(run_dir.eval_metrics, lambda record: _is_evaluated(record, progress))
        self._attempt = attempt
        self._console = console
        self._train = JsonLines(run_dir.train_metrics, console)
        self._evaluations = JsonLines(run_dir.eval_metrics, console)
        self._directory, self._first = run_dir.tensorboard, progress.step + 1
        self._board: SummaryWriter | None = None
        self._draws = True

    def train(self, record: Record) -> None:
        """Record a logged step."""
        self._train.append({**record, "attempt": self._attempt, "time": time.time()})
        self._draw("train", record["step"], {name: record[name] for name in ("loss", "lr", "images_per_second")})

    def evaluation(self, record: Record) -> None:
        """Record an evaluation."""
        self._evaluations.append({**record, "attempt": self._attempt, "time": time.time()})
        self._draw(record["split"], record["step"], {name: record[name] for name in ("loss", "accuracy")})

    def _draw(self, group: str, step: int, values: dict[str, float]) -> None:
        if not self._draws:
            return
        try:
            # Not before there is something to draw: all ranks would wait for the import before their first step.
            self._board = self._board or _open_board(self._directory, self._first)
            for name, value in values.items():
                self._board.add_scalar(f"{group}/{name}", value, step)
            self._board.flush()
        except OSError as error:
            self._console.warn(f"TensorBoard's file cannot be written ({error}): it ends here, the training goes on")
            self._draws = False

    def close(self) -> None:
        """Flush what is buffered."""
        if self._board and self._draws:
            with suppress(OSError):
                self._board.close()


def _open_board(directory: Path, first: int) -> "SummaryWriter":
    """The writer of TensorBoard's files. Events from the first step on were of a future that did not come about."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # half a second, and only for rank 0

    return SummaryWriter(str(directory), purge_step=first)


def _is_evaluated(record: Record, progress: Progress) -> bool:
    """Validations count until the last one that the state knows of; a test is repeated until `final/` exists."""
    return bool(record["split"] == "val" and record["epoch"] <= progress.evaluated_epochs)
