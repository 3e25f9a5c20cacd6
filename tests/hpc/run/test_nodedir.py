"""The directory of a run in a node's memory."""

import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import ROOT, need
from support.staging_nodes import hanging

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import DEV_SHM
from hpc.run.events.kinds import Cancelled
from hpc.run.events.ledger import EventWriter
from hpc.run.nodedir import HeldNodeDir, check_stage_dir, stage_dir_on_node
from hpc.run.rundir import RunDir


@pytest.fixture
def run() -> Iterator[Path]:
    path = Path(f"/runs/{uuid.uuid4().hex}")
    yield path
    HeldNodeDir(path, 0).close(remove=True)


def test_only_the_owner_can_use_the_directory(run: Path) -> None:
    held = HeldNodeDir(run, 0)
    assert held.files.path.is_relative_to(DEV_SHM)
    for path in (held.files.path.parent, *held.files.directories):
        assert path.stat().st_mode & 0o777 == 0o700
    held.close(remove=True)
    assert not held.files.path.exists()


# Holds the directory of a run, until it is killed.
AGENT = """
import sys, time
from pathlib import Path
from hpc.run.nodedir import HeldNodeDir
held = HeldNodeDir(Path(sys.argv[1]), 0)
(held.files.snapshots / "x").touch()
print(held.files.path, flush=True)
time.sleep(300)
"""


def test_directory_belongs_to_one_agent_and_once_it_is_killed_to_its_run_until_others_remove_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc.run.nodedir._LOCK_TIMEOUT_SECONDS", 0.0)
    command = [sys.executable, "-c", AGENT, str(run)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        left = Path(agent.stdout.readline().strip())
        with pytest.raises(TorchrelayError, match="another agent of this run is on this node"):
            HeldNodeDir(run, 0)
        HeldNodeDir(Path("/runs/other"), 0).close(remove=False)
        assert left.exists(), "its agent lives"
        agent.kill()

    held = HeldNodeDir(run, 0)
    assert held.files.path == left
    assert (held.files.snapshots / "x").exists()
    held.close(remove=False)

    other = HeldNodeDir(Path("/runs/other"), 0)
    assert not left.exists()
    other.close(remove=True)


def left_by(run: Path, *snapshots: str) -> Path:
    """What the killed agent of a run has left."""
    held = HeldNodeDir(run, 0)
    for name in snapshots:
        (held.files.snapshots / name).mkdir()
    held.close(remove=False)
    return held.files.path


def start_another(tmp_path: Path) -> None:
    """Start an agent of another run on this node."""
    HeldNodeDir(tmp_path / "another", 0).close(remove=True)


def test_snapshot_that_is_newer_than_the_checkpoints_of_its_run_is_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    (run.checkpoints / "step-00000040").mkdir(parents=True)
    left = left_by(run.path, "step-00000030", "step-00000050")
    start_another(tmp_path)
    assert (left / "snapshots" / "step-00000050").exists()
    (run.checkpoints / "step-00000050").mkdir()
    start_another(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("over", ["completed", "cancelled for good", "deleted", "replaced"])
def test_snapshot_of_a_run_that_is_over_is_removed(tmp_path: Path, over: str) -> None:
    run = RunDir(tmp_path / "run")
    run.events.mkdir(parents=True)
    run.spec.write_text("{}")
    left = left_by(run.path, "step-00000050")
    start_another(tmp_path)
    assert left.exists()
    if over == "completed":
        run.final.mkdir()
        run.final_result.write_text("{}")
    elif over == "cancelled for good":
        EventWriter(run.events / "cancel.jsonl").append(Cancelled(final=False))
        start_another(tmp_path)
        assert left.exists(), "hpc resume may continue from it"
        EventWriter(run.events / "cancel.jsonl").append(Cancelled(final=True))
    else:
        shutil.rmtree(run.path)
        if over == "replaced":
            run.path.mkdir()
            run.spec.write_text('{"name": "another"}')
    start_another(tmp_path)
    assert not left.exists()


@pytest.mark.timeout(60)
def test_run_on_storage_that_hangs_keeps_no_other_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc.run.nodedir._REMOVE_SECONDS", 0.3)
    run = tmp_path / "storage" / "run"
    run.mkdir(parents=True)
    left = left_by(run, "step-00000050")
    with hanging(run.parent):
        start_another(tmp_path)
    assert left.exists()
    shutil.rmtree(left)


OPEN = """
from pathlib import Path
from hpc.run.nodedir import HeldNodeDir, node_dirs
run = Path("/runs/unusable")
held = HeldNodeDir(run, 0)
assert node_dirs(run) == [held.files]
print(held.files.path.parent, held.problem)
held.close(remove=True)
"""


@pytest.mark.parametrize(
    ("options", "reason"),
    [("mode=777", "other users may rename what is in it"), ("mode=1777,nr_inodes=3", "No space left on device")],
)
def test_memory_that_cannot_be_used_is_replaced_by_tmp(options: str, reason: str) -> None:
    need("unshare", "mount")
    mount = f'mount -t tmpfs -o {options} none /dev/shm; exec "$@"'
    command = ["unshare", "--mount", "sh", "-ec", mount, "sh", sys.executable, "-c", OPEN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/tmp/torchrelay-0 ")
    assert reason in done.stdout
    assert "--stage-dir" not in done.stdout, "that flag changes nothing here"


def test_variables_of_a_stage_dir_are_those_of_the_node(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    job = {"SCRATCH": str(tmp_path), "SLURM_JOB_ID": "7", "EMPTY": ""}
    for given in ("$SCRATCH/${SLURM_JOB_ID}", f"{tmp_path}/$SLURM_JOB_ID"):
        assert stage_dir_on_node(check_stage_dir(given), job) == tmp_path / "7"
    assert check_stage_dir("disk") == f"{Path.cwd()}/disk"
    with pytest.raises(UserError, match=r"--stage-dir is '\$\(pwd\)': write variables as \$NAME"):
        check_stage_dir("$(pwd)")
    for missing in ("NOWHERE", "EMPTY"):
        with pytest.raises(
            TorchrelayError, match=rf"is \${missing}/x, but the job has no variable {missing} on .* srun"
        ):
            stage_dir_on_node(f"${missing}/x", job)
    with pytest.raises(TorchrelayError, match=r"is \$SCRATCH/8, which is .*/8, but .* has no such directory: submit"):
        stage_dir_on_node("$SCRATCH/8", job)
