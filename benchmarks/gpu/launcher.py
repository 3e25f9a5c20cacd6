"""Takes a run through the launcher as a user would: submit, kill a rank, cancel, resume, complete.

The other parts start their ranks themselves. Only here are ranks started as in a job: as forks of torchrun, which the
node's agent starts.
"""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Found, Row, data_directory, goal
from benchmarks.hpc_commands import hpc
from benchmarks.processes import naming

NAME = "launcher"
# More epochs than there is time for: the resumption sets the real number.
FLAGS = ("--epochs=10000", "--lr-scheduler=constant", "--warmup-epochs=0", "--val-split=0", "--log-every=1")
ON_GPU = ("--model=resnet20", "--batch-size=512", "--amp=bf16", "--device=cuda")
SMALL = ("--model=small-cnn", "--batch-size=64", "--device=cpu")
_TIMEOUT_SECONDS, _END_SECONDS = 300.0, 20.0


@dataclass(frozen=True)
class Launcher:
    """A run and the directory that it is in."""

    directory: Path
    name: str = NAME

    def hpc(self, *arguments: str) -> Any:
        """Type a verb, and return its answer."""
        return hpc(*arguments, f"--runs-dir={self.directory}")

    def wait(self, what: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a status, and return it. Raises SystemExit if the run ends before, or after too long."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            [status] = self.hpc("status", self.name)
            if reached(status):
                return dict(status)
            if status["state"] in {"failed", "completed"}:
                break
            time.sleep(0.5)
        logs = sorted(self.directory.glob(f"{self.name}/logs/**/*.*"))
        texts = (f"\n--- {path.name} ---\n{path.read_text(errors='replace')[-4000:]}" for path in logs)
        raise SystemExit(f"the run did not reach {what}: {json.dumps(status)}{''.join(texts)}")

    def wait_for_steps(self, number: int) -> dict[str, Any]:
        """Wait for a step, and return the run's status."""
        return self.wait(f"step {number}", lambda status: (status["step"] or 0) >= number)

    def processes_left(self, before: set[str]) -> int:
        """Return how many processes of the run, and new ones on the GPU, are left after a while."""
        deadline = time.monotonic() + _END_SECONDS
        while (left := len(self.own_processes()) + len(on_gpu() - before)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def own_processes(self) -> set[int]:
        """Return the processes of the run."""
        return set(naming(self.directory / self.name))


def on_gpu() -> set[str]:
    """Return the ids of the processes with memory on a GPU; in a container, they may be the host's ids."""
    if shutil.which("nvidia-smi") is None:
        return set()
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def play(launcher: Launcher, flags: Sequence[str]) -> tuple[list[Row], int]:
    """Submit, kill a rank, cancel and resume. Returns the table, and how many processes were left after both ends."""
    before, began = on_gpu(), time.monotonic()
    launcher.hpc("submit", f"--name={NAME}", "--cluster=local", "--nodes=1", "--gpus-per-node=1", *flags)
    status = launcher.wait_for_steps(20)
    rows = [row(f"from hpc submit to step 20 on {status['device']}", time.monotonic() - began)]
    [killed] = launcher.hpc("drill", NAME, "worker-kill", "--yes")["interruptions"]
    rows.append(row("from a rank's death to its next step", killed["seconds"]["total"], killed["steps_lost"]))
    began = time.monotonic()
    launcher.hpc("cancel", NAME)
    status = launcher.wait("the cancellation", lambda status: status["state"] == "cancelled")
    left = launcher.processes_left(before)
    rows.append(row("from hpc cancel to the end of all processes", time.monotonic() - began))
    began = time.monotonic()
    launcher.hpc("resume", NAME, f"--epochs={status['epoch'] + 1}")
    status = launcher.wait("the end", lambda status: status["state"] == "completed")
    lost = status["steps_lost"] - killed["steps_lost"]
    rows.append(row("from hpc resume to the complete run", time.monotonic() - began, lost))
    return rows, left + launcher.processes_left(before)


def row(what: str, seconds: float, steps_lost: int | None = None) -> Row:
    """Return a row of the table."""
    return {"what": what, "seconds": round(seconds, 1), "steps_lost": steps_lost}


def measure(*, small: bool) -> Found:
    """Take the run from its submission to its end."""
    with tempfile.TemporaryDirectory() as directory:
        few, runs = Path(directory) / "data", Path(directory).resolve() / "runs"
        few.mkdir()
        data = data_directory(few if small else None)
        launcher = Launcher(runs)
        try:
            rows, left = play(launcher, [f"--data={data}", *FLAGS, *(SMALL if small else ON_GPU)])
        finally:
            if launcher.own_processes():
                launcher.hpc("cancel", NAME, "--final")
    lost = rows[-1]["steps_lost"]
    return rows, [
        goal("steps that hpc cancel cost a run that was resumed and completed", lost, "0", met=lost == 0),
        goal("processes of the run that were left, on the GPU or elsewhere", left, "0", met=left == 0),
    ]
