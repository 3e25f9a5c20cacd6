"""The library for scripts of one's own: reports, refusals, and the last checkpoint."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torchrelay
from support.cluster import ROOT
from support.events import assert_typed
from support.relay_script import agent_variables
from support.trainings import run_forked

from hpc.base.environment import HEARTBEAT, NEXT_CLAIM, PROTOCOL
from hpc.run.rundir import LIBRARY

pytestmark = pytest.mark.timeout(300)


def test_outside_of_a_run_nothing_is_stopped_written_or_imported(tmp_path: Path) -> None:
    code = (
        "import signal, sys, torchrelay\n"
        "with torchrelay.state() as saved:\n"
        "    torchrelay.report(step=1, loss=0.5)\n"
        "    print(saved.step, torchrelay.should_stop(), signal.getsignal(signal.SIGTERM), 'torch' in sys.modules)\n"
    )
    # Isolated and without site-packages: where Torchrelay is not installed.
    argv = [sys.executable, "-ISc", f"import sys; sys.path.insert(0, {str(ROOT / LIBRARY)!r})\n{code}"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "0 False 0 False\n", done.stderr


def run_alone(code: str, directory: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a script of a run as its only rank; the directory is that of the run, too."""
    return run_forked(code, directory=directory, TORCHRELAY_RUN_DIR=str(directory), **environment)


def test_ranks_that_are_not_connected_are_told_what_to_do(tmp_path: Path) -> None:
    done = run_alone("import torchrelay; torchrelay.should_stop()", tmp_path, WORLD_SIZE="2")
    assert "should_stop() needs the other ranks: call it after torch.distributed.init_process_group()" in done.stderr


def test_torn_line_costs_no_other_and_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics" / "train.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 1}\n{"step": ')
    code = "import torchrelay; torchrelay.report(step=3, loss=float('nan'), lr=0.1)"
    assert run_alone(code, tmp_path).returncode == 0
    first, torn, last = metrics.read_text().splitlines()
    assert (json.loads(first), torn) == ({"step": 1}, '{"step": ')
    assert json.loads(last).items() >= {"step": 3, "loss": None, "lr": 0.1}.items()


NUMBERS = """
import torch, numpy, torchrelay
for _ in range(2):
    torchrelay.report(
        step=numpy.int64(3), loss=torch.tensor([0.5]), lr=numpy.float32(0.25), is_best=True, best=None,
        note="text", rates=[0.1, 0.2], many=torch.zeros(3), huge=10**400, by_name={"a": 1}, time=1.0,
    )
    torchrelay.report(step="4", loss=0.5)
torchrelay.report(step=5.0)
torchrelay.report(step=5.0, loss=0.1)
"""


def test_report_leaves_out_what_is_no_number_and_says_so_once(tmp_path: Path) -> None:
    done = run_forked(NUMBERS, directory=tmp_path, **agent_variables(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics" / "train.jsonl").read_text().splitlines()]
    numbers = {"step": 3, "loss": 0.5, "lr": 0.25, "is_best": 1, "best": None}
    shown = [{name: line[name] for name in line.keys() - {"time", "world_size", "attempt"}} for line in lines]
    assert shown == [numbers, numbers, {"step": 5, "loss": 0.1}]
    warnings = [re.sub(r"torchrelay: rank 0: report\((\w+)=.*", r"\1", line) for line in done.stderr.splitlines()]
    assert warnings == ["note", "rates", "many", "huge", "by_name", "time", "step"]
    assert "report(note='text'): must be real number, not str; note is left out, and the training continues" in (
        done.stderr
    )


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("keep", (0, -1, True, 1.5, None), "a whole number, 1 or greater"),
        ("checkpoint_seconds", (-1, float("nan"), True, "600", None), "a number, 0 or greater"),
        ("snapshot_seconds", (-0.5, float("nan"), False, "1", None), "a number, 0 or greater"),
    ],
)
def test_state_refuses_wrong_numbers(name: str, values: tuple[Any, ...], rule: str) -> None:
    for value in values:
        wrong: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=re.escape(f"state({name}={value!r}): {name} must be {rule}")):
            torchrelay.state(**wrong)
    torchrelay.state(keep=1, checkpoint_seconds=float("inf"), snapshot_seconds=0)


REFUSED = """
from {library} import report, should_stop, state
for call in (lambda: report(step=1, loss=0.5), should_stop, lambda: state().__enter__()):
    try:
        call()
    except (OSError, RuntimeError) as error:
        print(type(error).__name__, error)
"""


def test_rank_that_cannot_tell_whether_the_next_attempt_has_begun_writes_nothing(tmp_path: Path) -> None:
    variables = {**agent_variables(tmp_path), NEXT_CLAIM: str(tmp_path / "nowhere" / "next")}
    done = run_forked(REFUSED.format(library="torchrelay"), directory=tmp_path, **variables)
    [refusal] = done.stdout.splitlines()
    assert re.match("FileNotFoundError .*No such file or directory: .*nowhere", refusal)
    assert done.stderr.count("cannot be written") == 1, "a report continues without storage"
    assert not (tmp_path / "metrics" / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("library", "protocol", "advice"),
    [
        ("relay", "2", r"\(protocol 1, not 2\): remove it from your project, and use `from torchrelay import ...`"),
        ("torchrelay", None, r"\(protocol 1, not None\): .*; or update torchrelay, and submit the run again"),
    ],
)
def test_library_that_is_not_of_the_runs_version_says_so_at_each_call_and_writes_nothing(
    tmp_path: Path, library: str, protocol: str | None, advice: str
) -> None:
    copy = shutil.copytree(Path(torchrelay.__file__).parent, tmp_path / "code" / library)
    variables = {**agent_variables(tmp_path), HEARTBEAT: str(tmp_path / "heartbeat"), PROTOCOL: protocol}
    variables = {name: value for name, value in variables.items() if value is not None}
    done = run_forked(REFUSED.format(library=library), directory=tmp_path / "code", **variables)
    found = [bool(re.match(f"OtherVersionError {copy} is of .*{advice}", line)) for line in done.stdout.splitlines()]
    assert found == [True] * 3, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code", "events", "heartbeat.steps"]
    assert not list((tmp_path / "events").iterdir())


def test_copied_library_of_the_runs_protocol_works(tmp_path: Path) -> None:
    shutil.copytree(Path(torchrelay.__file__).parent, tmp_path / "relay")
    code = "from relay import report, state\nwith state() as saved:\n    saved.step = 3\n    report(step=3, loss=0.5)\n"
    done = run_forked(code, directory=tmp_path, **agent_variables(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()
    assert (tmp_path / "metrics" / "train.jsonl").exists()


def test_signal_that_the_run_was_submitted_with_stops_it_too(tmp_path: Path) -> None:
    code = (
        "import os, signal, torchrelay\n"
        "with torchrelay.state() as saved:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print(torchrelay.should_stop(), torchrelay.should_stop())\n"
    )
    done = run_alone(code, tmp_path, TORCHRELAY_STOP_SIGNAL="SIGHUP")
    assert done.stdout == "True True\n", done.stderr
    assert (tmp_path / "checkpoints" / "step-00000000").is_dir(), "whatever the step"


def test_checkpoint_that_failed_at_the_last_step_is_tried_again_by_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    code = (
        "import time\n"
        "from pathlib import Path\n"
        "from torch import distributed\n"
        "import torchrelay\n"
        "distributed.init_process_group('gloo')\n"
        "with torchrelay.state(checkpoint_seconds=0, snapshot_seconds=0) as saved:\n"
        "    for saved.step in (1, 2):\n"
        "        torchrelay.should_stop()\n"
        "    if distributed.get_rank() == 0:\n"
        "        while not Path('events/attempt-001-script.jsonl').read_text().count('checkpoint_failed'):\n"
        "            time.sleep(0.01)\n"
        "        Path('checkpoints').unlink()\n"
        "distributed.destroy_process_group()\n"
    )
    done = run_forked(code, directory=tmp_path, ranks=2, **agent_variables(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "the checkpoint of step 2 was not saved (" in done.stderr
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()
    assert "problem" in assert_typed(tmp_path / "events")


def save(step: int, directory: Path) -> "subprocess.CompletedProcess[str]":
    """Restore the newest state, print its step and which directories were made durable, and save this step."""
    code = (
        "import os, torchrelay\n"
        "fsync = os.fsync\n"
        "def spy(descriptor):\n"
        "    print('fsync', os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}')))\n"
        "    fsync(descriptor)\n"
        "os.fsync = spy\n"
        "with torchrelay.state() as saved:\n"
        "    print('restored', saved.step)\n"
        f"    saved.step = {step}\n"
    )
    return run_forked(code, directory=directory, **agent_variables(directory))


def test_checkpoint_is_on_the_disk_and_kept_for_the_next_start_if_the_storage_cannot_read_it(tmp_path: Path) -> None:
    written = save(86, tmp_path).stdout.splitlines()
    temporary, parent = [line.split()[1] for line in written if line.startswith("fsync ")][3:]
    assert temporary.startswith(".step-00000086."), "after its files"
    assert parent == "checkpoints"
    unreadable = tmp_path / "checkpoints" / "step-00000086" / "state.json"
    content = unreadable.read_bytes()
    unreadable.unlink()
    unreadable.symlink_to(unreadable)  # too many levels of symbolic links, for root too
    done = save(90, tmp_path)
    assert done.returncode != 0
    assert "step-00000086 cannot be read" in done.stderr
    unreadable.unlink()
    unreadable.write_bytes(content)
    assert "restored 86" in save(90, tmp_path).stdout


def test_first_report_is_the_first_step_of_a_script_without_state(tmp_path: Path) -> None:
    code = "from torchrelay import report\nfor step in (5, 6): report(step=step, loss=1.0)"
    environment = {**os.environ, **agent_variables(tmp_path), "RANK": "0"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    [line] = (tmp_path / "events" / "attempt-001-script.jsonl").read_text().splitlines()
    assert (json.loads(line)["event"], json.loads(line)["step"]) == ("first_step", 5)
