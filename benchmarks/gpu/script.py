"""A script with `torchrelay.state` (examples/ddp): killed and preempted, does it end with the same bits?"""

import gzip
import os
import signal
import tempfile
from pathlib import Path

from torchrelay.checkpoint_files import STATE_TENSORS, list_checkpoints, step_of

from benchmarks.gpu.launcher import Launcher
from benchmarks.gpu.part import Found, Row, data_directory, same_bits
from benchmarks.harness import ROOT
from benchmarks.hpc_commands import hpc
from training.config.dataset_layout import resolve_data

_STEPS = 50
_SCRIPT = ROOT / "examples" / "ddp" / "train.py"


def train(launcher: Launcher, data: Path, epochs: int) -> None:
    """Submit the script."""
    where = ("--cluster=local", "--nodes=1", "--gpus-per-node=1", f"--runs-dir={launcher.directory}")
    hpc("submit", f"--name={launcher.name}", *where, "--", str(_SCRIPT), f"--data={data}", f"--epochs={epochs}")


def interrupt(launcher: Launcher) -> Row:
    """Kill a rank and preempt the run. Returns what that costs."""
    launcher.wait_for_steps(_STEPS)
    [killed] = launcher.hpc("drill", launcher.name, "worker-kill", "--yes")["interruptions"]
    status = launcher.wait_for_steps(killed["step"] + _STEPS)
    os.kill(int(status["job_id"]), signal.SIGTERM)  # the run requeues itself
    status = launcher.wait("the second attempt", lambda status: len(status["attempts"]) == 2)
    return {"what": "from a rank's death to its next step", "seconds": round(killed["seconds"]["total"], 1)}


def final_state(launcher: Launcher) -> tuple[int, bytes]:
    """Return the last step, and the tensors that were saved after it."""
    launcher.wait("the end", lambda status: status["state"] == "completed")
    last = max(list_checkpoints(launcher.directory / launcher.name / "checkpoints"), key=step_of)
    return step_of(last), (last / STATE_TENSORS).read_bytes()


def measure(*, small: bool) -> Found:
    """Train twice, once without interruptions, and compare."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it, two trainings on a GPU may differ
    with tempfile.TemporaryDirectory() as directory:
        few, data, runs = (Path(directory).resolve() / name for name in ("few", "data", "runs"))
        few.mkdir()
        data.mkdir()
        packed, epochs = resolve_data(data_directory(few if small else None)), 200 if small else 5
        for path in Path(packed).glob("*-ubyte.gz"):
            (data / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        undisturbed, interrupted = (Launcher(runs, name) for name in ("undisturbed", "interrupted"))
        try:
            train(undisturbed, data, epochs)
            expected = final_state(undisturbed)
            train(interrupted, data, epochs)
            rows = [interrupt(interrupted), {"what": f"all {expected[0]} steps"}]
            same = final_state(interrupted) == expected
        finally:
            for launcher in (undisturbed, interrupted):
                if launcher.own_processes():
                    launcher.hpc("cancel", launcher.name, "--final")
    return rows, [same_bits("a script with state(), killed and preempted", same)]
