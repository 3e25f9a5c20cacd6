"""An attempt that still runs after the next one has begun publishes nothing, however slow its storage is."""

import os
import time
from functools import partial
from pathlib import Path

from support.relay_script import agent_variables
from support.trainings import Starter, lines, run_forked

from hpc.run.events.ledger import claim_file
from hpc.run.rundir import RunDir

# 193 images: 19 steps an epoch.
FLAGS = ("--epochs=3", "--batch-size=10", "--log-every=1", "--checkpoint-every=5", "--keep-checkpoints=50")


def hold_checkpoints(released: Path) -> None:
    """In a rank, delay checkpoints until the file `released` exists."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        while "/checkpoints/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()) and not released.exists():
            time.sleep(0.01)
        fsync(descriptor)

    os.fsync = slow  # type: ignore[assignment]


def written(run: RunDir) -> dict[str, bytes]:
    """Return all files of a run from which the next attempt continues."""
    directories = (run.train_metrics.parent, run.checkpoints, run.best, run.final)
    files = [path for directory in directories for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(run.path)): path.read_bytes() for path in files}


def test_checkpoint_and_metrics_that_come_after_the_next_attempt_are_not_published(
    start: Starter, tmp_path: Path
) -> None:
    released = tmp_path / "released"
    late = start(*FLAGS, prepare=partial(hold_checkpoints, released))
    run = RunDir(late.run_dir)
    late.wait_until(lambda: any(run.checkpoints.glob(".step-*/manifest.json")))
    claim_file(run, 2).touch()  # as its agent would
    done = len(lines(run.train_metrics))
    released.touch()
    assert late.wait() == [1], late.output()
    assert "attempt 2 of run run has begun: attempt 1 writes nothing more" in late.output()
    assert list(run.checkpoints.iterdir()) == []
    assert len(lines(run.train_metrics)) <= done + 1, "the line that was being written"
    before = written(run)
    assert start(*FLAGS, "--attempt=1").wait() == [1], "the ranks that its torchrun starts in their place"
    assert written(run) == before
    second = start(*FLAGS, "--attempt=2")
    assert second.wait() == [0], second.output()
    steps = [line["step"] for line in lines(run.train_metrics)]
    assert steps == list(range(1, 58))


SUCCEEDED = """
import sys
from pathlib import Path
from torchrelay import report, state

def refused(call):
    try:
        call()
    except RuntimeError as error:
        print(error)

def go_on():
    with state() as saved:
        saved.step += 1
        Path(sys.argv[1]).touch()

with state() as saved:
    saved.step = 7
    report(step=7, loss=1.0)
refused(go_on)
refused(lambda: report(step=8, loss=1.0))
refused(lambda: state().__enter__())
"""


def test_script_publishes_nothing_after_the_next_attempt_has_begun(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    done = run_forked(SUCCEEDED, str(claim_file(run, 2)), directory=tmp_path, **agent_variables(tmp_path))
    assert done.stdout == 3 * "attempt 2 has begun: attempt 1 writes nothing more\n", done.stderr
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000007"]
    assert [line["step"] for line in lines(run.train_metrics)] == [7]
