"""A node of an attempt, without its agent; an attempt that has just ended."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cluster import Command
from support.ended_attempts import AnsweringSlurm, EndedAttempt, EndedAttemptMaker
from support.events import script_spec

from hpc.run.events.attempts import Attempt
from hpc.run.nodedir import HeldNodeDir, NodeDir
from hpc.run.rundir import RunDir
from jobs import ending, node_attempt
from jobs.node_attempt import NodeAllocation, NodeAttempt


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A directory for a run, with no files of other tests' runs beside it."""
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def node(tmp_path: Path) -> NodeAttempt:
    run = RunDir(tmp_path)
    run.logs.mkdir()  # the submission makes it
    return NodeAttempt(
        run=run,
        spec=script_spec(),
        allocation=NodeAllocation(
            cluster="slurm", job_id="7", restart=0, node_rank=0, hostnames=("gpu01",), cpus=1
        ),
        attempt=Attempt(attempt=1, job_id="7", restart=0, secret="n", port=1, nodes=("gpu01",), started=1.0),
    )  # fmt: skip


@pytest.fixture
def held(node: NodeAttempt) -> Iterator[HeldNodeDir]:
    made = HeldNodeDir(node.run.path, 0)
    yield made
    made.close(remove=True)


@pytest.fixture
def slurm(slurm_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AnsweringSlurm:
    monkeypatch.setattr(node_attempt, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(ending, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(ending, "_CONFIRM_POLL_SECONDS", 0.01)
    return AnsweringSlurm(slurm_command, tmp_path)


@pytest.fixture
def ended(tmp_path: Path, slurm: AnsweringSlurm) -> EndedAttemptMaker:  # noqa: ARG001  # replaces Slurm's commands
    return lambda *events, **settings: EndedAttempt(tmp_path, *events, **settings)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[NodeDir, RunDir]]:
    """The snapshots that were to be saved; each is of step 40, and saved if the attempt is the newest."""
    calls = []

    def save(node_dir: NodeDir, run: RunDir, check: Callable[[], None]) -> int:
        check()
        calls.append((node_dir, run))
        return 40

    monkeypatch.setattr(ending, "save_newest_as_checkpoint", save)
    return calls
