"""The directory of a run in a node's memory."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import ROOT

from hpc.core.errors import TorchrelayError
from hpc.core.nodedir import DEV_SHM, NodeDir, open_node_dir, private_directory


def remove(memory: NodeDir, held: int) -> None:
    shutil.rmtree(memory.path)
    os.close(held)


@pytest.fixture
def run() -> Iterator[Path]:
    path = Path(f"/runs/{uuid.uuid4().hex}")
    yield path
    memory, held = open_node_dir(path, 0)
    remove(memory, held)


def test_only_the_owner_can_use_the_directory(run: Path) -> None:
    memory, held = open_node_dir(run, 0)
    assert memory.path.is_relative_to(DEV_SHM)
    for path in (memory.path.parent, memory.path, memory.snapshots, memory.exits):
        assert path.stat().st_mode & 0o777 == 0o700
    remove(memory, held)
    assert not memory.path.exists()


@contextmanager
def agent_of(run: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the directory of a run; killed in the end."""
    code = (
        "import sys, time; from pathlib import Path; from hpc.core.nodedir import open_node_dir\n"
        "memory, held = open_node_dir(Path(sys.argv[1]), 0); (memory.snapshots / 'x').touch()\n"
        "print(memory.path, flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as agent:
        yield agent
        agent.kill()


def test_directory_of_a_killed_agent_is_reused_by_its_run_and_removed_by_others(run: Path) -> None:
    with agent_of(run) as agent:
        assert agent.stdout is not None
        left = Path(agent.stdout.readline().strip())
        _, held = open_node_dir(Path("/runs/other"), 0)
        assert left.exists(), "its agent lives"
        os.close(held)

    memory, held = open_node_dir(run, 0)
    assert memory.path == left
    assert (memory.snapshots / "x").exists()
    os.close(held)

    other, held = open_node_dir(Path("/runs/other"), 0)
    assert not left.exists()
    remove(other, held)


def test_second_agent_of_a_run_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc.core.nodedir._LOCK_TIMEOUT_SECONDS", 0.0)
    with agent_of(run) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        with pytest.raises(TorchrelayError, match="another agent of this run is on this node"):
            open_node_dir(run, 0)


def test_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    root = private_directory(tmp_path)
    root.chmod(0o777)
    with pytest.raises(TorchrelayError, match="not a directory that only you can use"):
        private_directory(tmp_path)
