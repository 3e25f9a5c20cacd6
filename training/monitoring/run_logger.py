"""Writes events, metrics (JSON lines and TensorBoard), `best/` and `final/`. Runs on every rank; rank 0 writes.

A resumed run first removes the metrics of steps after the restored one, because it repeats these steps. While the disk
is full, metrics wait in memory.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torchrelay.checkpoint_files import publish_directory, remove_unpublished
from torchrelay.saving.state_writer import BackgroundWriter

from hpc.base.errors import EXIT_NO_SPACE, TorchrelayError, UserError
from hpc.base.files import (
    DISK_FULL,
    append_json_line,
    json_line,
    make_below,
    read_json_lines,
    write_atomic,
    write_json,
)
from hpc.base.text import visible
from hpc.run.events.kinds import Event, Problem
from hpc.run.events.ledger import EventWriter, attempt_prefix, check_is_newest
from hpc.run.rundir import MODEL_WEIGHTS, RunDir
from training.data.loader import ImageSource
from training.runtime.train_progress import Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Console:
    """Prints lines if it is enabled; `RunLogger` enables it on rank 0."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def print(self, text: str) -> None:
        """Print a line."""
        # The log's disk may be full, and this error must not end the training.
        with suppress(OSError):
            if self._enabled:
                print(visible(text), flush=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.print(f"warning: {text}")


_RESULT = "result.json"

Record = dict[str, Any]
Weights = dict[str, Tensor]
Files = Mapping[str, bytes]


def keep_only(path: Path, wanted: Callable[[Record], bool]) -> None:
    """Remove torn lines, and records that are not `wanted`, from a file of JSON lines."""
    kept = "".join(json_line(record) for record in read_json_lines(path) if wanted(record))
    if path.exists() and kept.encode() != path.read_bytes():
        write_atomic(path, kept)


class JsonLines:
    """Appends to a file of JSON lines. If a write fails, such as on a full disk, a later `append` repeats it.

    `check` is called before each write, and raises an error if this process may no longer write to the file.
    """

    def __init__(self, run_dir: RunDir, path: Path, console: Console, check: Callable[[], None] | None = None) -> None:
        self._run_dir, self._path, self._check = run_dir, path, check
        self._console = console
        self._waiting: list[Record] = []

    def append(self, record: Record) -> None:
        """Append a record, after the records whose writes failed. Warns if the file cannot be written."""
        self._waiting.append(record)
        try:
            if self._check:
                self._check()
            make_below(self._run_dir.path, self._path.parent)
            while self._waiting:
                append_json_line(self._path, self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            self._console.warn(f"{self._path} cannot be written ({error}): free some space; its lines wait in memory")


class NoSpaceError(TorchrelayError):
    """Raised if the disk has no space for the result of the run."""

    exit_code = EXIT_NO_SPACE


class RunLogger:
    """Writes the files that people and other programs read, but none if `writes` is False, as on ranks other than 0.

    Raises:
        UserError: the run directory cannot be made.
        SucceededError: a later attempt has begun. Methods that write metrics or models raise it, too.
    """

    def __init__(self, run_dir: RunDir, attempt: int, *, writes: bool) -> None:
        self._run_dir, self._attempt, self._writes = run_dir, attempt, writes
        self.console = Console(enabled=writes)
        self.best = BackgroundWriter()
        """Writes `best/`."""
        self.metrics = BackgroundWriter()
        """Writes metrics. Any thread may wait for it."""
        self._unpublished: tuple[Weights, dict[str, Any], Files] | None = None
        self._ledger = EventWriter(run_dir.events / f"{attempt_prefix(attempt)}trainer.jsonl", attempt)
        self._train = JsonLines(run_dir, run_dir.train_metrics, self.console, self.check_is_newest)
        self._evaluations = JsonLines(run_dir, run_dir.eval_metrics, self.console, self.check_is_newest)
        self._tensorboard: SummaryWriter | None = None
        self._tensorboard_works = True
        self._first_step = 1
        if writes:
            try:
                run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                run_dir.events.mkdir(exist_ok=True)
                self.check_is_newest()
                remove_unpublished(run_dir.path, run_dir.best.name)
                remove_unpublished(run_dir.path, run_dir.final.name)
            except OSError as error:
                reason = f"which cannot be made ({error})"
                raise UserError(f"--run-dir is {run_dir.path}, {reason}: use another directory") from error

    def check_is_newest(self) -> None:
        """Raise SucceededError if a later attempt has begun, which this one must not disturb."""
        check_is_newest(self._run_dir, self._attempt)

    def resume(self, progress: Progress) -> None:
        """Remove the metrics of steps after the restored `progress`."""
        self._first_step = progress.step + 1
        if self._writes:
            self.check_is_newest()
            keep_only(self._run_dir.train_metrics, lambda record: record["step"] <= progress.step)
            # Keep only the validations that the restored state includes. A test is repeated until `final/` exists.
            keep_only(
                self._run_dir.eval_metrics,
                lambda record: bool(record["split"] == "val" and record["epoch"] <= progress.evaluated_epochs),
            )

    def event(self, event: Event) -> None:
        """Append an event to the ledger. Warns if that fails."""
        if not self._writes:
            return
        try:
            self._ledger.append(event)
        except OSError as error:
            self.console.warn(f"{self._ledger.path} cannot be written ({error}): event {event.kind!r} is lost")

    def log_later(self, log: Callable[[], None]) -> None:
        """Have a background thread call `log`, which calls `log_metrics`. The calls keep their order.

        `log` may wait for the device and for a slow disk.
        """
        if self._writes:
            self.metrics.enqueue(log)

    def log_metrics(self, record: Record) -> None:
        """Write the metrics of a step or, if `record` has a `split`, of an evaluation. Call this within `log_later`."""
        lines, scalars = self._train, ["loss", "accuracy", "lr", "images_per_second"]
        if "split" in record:
            lines, scalars = self._evaluations, ["loss", "accuracy"]
        lines.append({**record, "attempt": self._attempt, "time": time.time()})
        if not self._tensorboard_works:
            return
        try:
            if self._tensorboard is None:
                # Import it here: at the top, all ranks would wait half a second for it before their first step.
                from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

                # `purge_step` hides what an earlier attempt wrote for this step and later ones.
                self._tensorboard = SummaryWriter(str(self._run_dir.tensorboard), purge_step=self._first_step)
            for name in scalars:
                self._tensorboard.add_scalar(f"{record.get('split', 'train')}/{name}", record[name], record["step"])
            self._tensorboard.flush()
        except OSError as error:
            self.console.warn(f"TensorBoard's file cannot be written ({error}): the training continues without it")
            self._tensorboard_works = False

    def record_divergence(self, divergence: dict[str, Any], indices: list[int], source: ImageSource) -> None:
        """Write the first step whose loss is not finite (training.engine.recomputation) and its images."""
        if not self._writes:
            return
        step = divergence["step"]
        what = f"the loss is {divergence['loss']}"
        self.event(Problem(what="diverged", step=step, rank=divergence["rank"], detail=what))
        images = [source.name(index) for index in indices]
        try:
            write_json(self._run_dir.diverged, {**divergence, "indices": indices, "images": images})
        except OSError as error:
            self.console.warn(f"{self._run_dir.diverged} cannot be written ({error})")
        else:
            self.console.print(f"the {len(indices)} images of step {step} are in {self._run_dir.diverged}")

    def save_best(self, weights: Weights, result: dict[str, Any], files: Files) -> None:
        """Start to replace `best/` in the background. If the write fails, `close` tries again.

        The weights must not change meanwhile. `files` are the contents of other files, by name.
        """
        if self._writes:
            self.best.submit(partial(self._publish_best, weights, result, files))

    def _publish_best(self, weights: Weights, result: dict[str, Any], files: Files) -> None:
        self._unpublished = None
        try:
            write = partial(_write_model, weights, result, files)
            publish_directory(self._run_dir.best, write, check=self.check_is_newest)
        except OSError as error:
            self._unpublished = (weights, result, files)
            self.console.warn(f"{self._run_dir.best} cannot be written ({error}): the training continues without it")

    def load_best(self) -> tuple[Weights, dict[str, Any]] | None:
        """Return the weights and the result in `best/`, or None if they cannot be read or on ranks other than 0."""
        if not self._writes:
            return None
        self.best.wait()
        if self._unpublished:
            return self._unpublished[:2]
        try:
            best = self._run_dir.best
            return load_file(best / MODEL_WEIGHTS), json.loads((best / _RESULT).read_bytes())
        except (OSError, SafetensorError, ValueError) as error:
            self.console.warn(f"{self._run_dir.best} cannot be read ({error}): the best model is not tested")
            return None

    def save_final(self, weights: Weights, result: dict[str, Any], files: Files) -> None:
        """Write `final/`, which marks the run as complete. The arguments are as in `save_best`.

        An evaluation passes no weights, because they belong to another run.

        Raises:
            NoSpaceError: the disk is full. The newest checkpoint has the last step.
            TorchrelayError: `final/` cannot be written for another reason.
        """
        if not self._writes:
            return
        # A complete run has all its metrics.
        self.metrics.wait()
        self.best.wait()
        try:
            write = partial(_write_model, weights, result, files)
            publish_directory(self._run_dir.final, write, check=self.check_is_newest)
        except OSError as error:
            full = error.errno in DISK_FULL
            raise (NoSpaceError if full else TorchrelayError)(
                f"{self._run_dir.final} cannot be written ({error}): free some space and start the run again"
            ) from error

    def close(self) -> None:
        """Wait for all writes, and write `best/` again if its last write failed."""
        self.metrics.wait()
        self.best.wait()
        if self._unpublished:
            self._publish_best(*self._unpublished)


def _write_model(weights: Weights, result: dict[str, Any], files: Files, directory: Path) -> None:
    # Serialize in memory, and then write: safetensors itself would raise no OSError on a full disk.
    if weights:
        (directory / MODEL_WEIGHTS).write_bytes(save(weights, {"format": "pt"}))
    (directory / _RESULT).write_text(json.dumps(result, indent=2) + "\n")
    for name, content in files.items():
        (directory / name).write_bytes(content)
