"""`hpc clean` without Slurm: it lists what runs that have ended hold, and removes what it is told to."""

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster import Site, refused, shared_directory
from support.events import cancelled, event, submitted, write_events
from support.fake_slurm import write_programs
from support.reported_runs import complete, running_run, spec_of

from hpc.base.kernel import start_time
from hpc.commands.runs.clean import remove
from hpc.run.rundir import RunDir

ALL = {"complete", "stopped", "small"}


@pytest.fixture(scope="module")
def untouched() -> Iterator[Site]:
    """Two complete runs, of which `small` has no checkpoints; `stopped`, cancelled, is larger, and 40 days old."""
    here = Site(shared_directory(), "/nonexistent")
    (here.path / "data").mkdir()
    saved = event("checkpoint_saved", attempt=2, step=400, seconds=1.0, copy_seconds=0.1)
    for name in ALL:
        spec = spec_of(name, data=str(here.path / "data"), lr_scheduler="constant")
        run = running_run(here.path / "runs" / name, spec=replace(spec, cluster="local"))
        write_events(run, saved)
        if name == "stopped":
            write_events(run, cancelled())
            (run.logs / "large.log").write_bytes(os.urandom(2**22))
        else:
            complete(run)
            (run.final / "model.safetensors").write_bytes(b"weights")
        for file in (run.checkpoints / "step-00000400" / "state.safetensors", run.packages):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(os.urandom(2**14))
    shutil.rmtree(here.path / "runs" / "small" / "checkpoints")
    old = here.path / "runs" / "stopped"
    age = time.time() - 40 * 86400
    for path in (*old.rglob("*"), old):
        os.utime(path, (age, age))
    yield here
    shutil.rmtree(here.path)


@pytest.fixture
def site(untouched: Site, shared: Path) -> Site:
    """The same runs, to be removed."""
    shutil.copytree(untouched.path / "runs", shared / "runs")
    return Site(shared, "/nonexistent")


def listed(site: Site, *arguments: str) -> list[str]:
    """The runs that `hpc clean` names."""
    done = site.hpc("clean", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [one["run"] for one in json.loads(done.stdout)["runs"]]


def there(site: Site) -> set[str]:
    """What is in the directory of the runs."""
    return {path.name for path in (site.path / "runs").iterdir()}


def test_largest_is_first_and_nothing_is_removed_without_yes(untouched: Site) -> None:
    shown = untouched.hpc("clean").stdout
    rows = [line.split() for line in shown.splitlines()]
    assert [row[:2] for row in rows[1:4]] == [
        ["stopped", "cancelled"],
        ["complete", "completed"],
        ["small", "completed"],
    ]
    assert shown.endswith(": --yes removes these runs\n")
    [first, *_] = json.loads(untouched.hpc("clean", "--json").stdout)["runs"]
    assert first["size"] > first["checkpoints"] + 2**22 > 2**22
    assert there(untouched) == ALL


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--state=failed,cancelled"], ["stopped"]),
        (["--state=failed"], []),
        (["--older-than=30d"], ["stopped"]),
        (["--older-than=50d"], []),
        (["small", "complete"], ["complete", "small"]),
        (["--checkpoints-only", "--state=completed"], ["complete", "small"]),
    ],
)
def test_flags_choose_runs(untouched: Site, flags: list[str], names: list[str]) -> None:
    assert listed(untouched, *flags) == names


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--yes"], "--yes alone would remove all 3 runs that have ended: name them, or give --older-than 30d"),
        (["--state=done"], "--state is 'done': use one or several of cancelled,completed,failed"),
        (["--older-than=30"], "--older-than is '30': use a duration such as"),
        (["complet", "--yes"], "there is no run 'complet': existing runs: complete"),
    ],
)
def test_wrong_command_lines_say_what_to_type(untouched: Site, flags: list[str], says: str) -> None:
    assert says in refused(untouched, "clean", *flags)
    assert there(untouched) == ALL


def test_only_what_was_asked_for_is_removed_and_what_a_kill_had_left(site: Site) -> None:
    runs = site.path / "runs"
    # The drafts of a submission that was killed long ago, and of one that still runs.
    drafts = [runs / f".halfmade.{uuid.uuid4().hex}.tmp" for _ in range(2)]
    for left in (runs / f".old.{uuid.uuid4().hex}.removed", *drafts):
        shutil.copytree(runs / "small", left)
    part = runs / f".digits.npz.{uuid.uuid4().hex}.tmp"
    part.touch()
    for killed in (drafts[0], part):
        os.utime(killed, (0, 0))
    shown = site.hpc("status").stdout
    assert not any(name in shown for name in ("old", "halfmade")), "a run that is being removed or made is not listed"
    assert listed(site, "--state=cancelled", "--yes") == ["stopped"]
    assert there(site) == {"complete", "small", drafts[1].name}


def test_checkpoints_alone(site: Site) -> None:
    path = site.path / "runs" / "complete"
    kept = {file.relative_to(path) for file in path.rglob("*") if "checkpoints" not in file.parts}
    assert listed(site, "complete", "--checkpoints-only", "--yes") == ["complete"]
    assert {file.relative_to(path) for file in path.rglob("*")} == kept
    assert (path / "final" / "model.safetensors").exists()
    assert "so it would start from the beginning: type hpc submit" in refused(site, "resume", "complete", "--epochs=5")
    assert "has no checkpoint in" in refused(site, "fork", "complete", "--name=x", "--epochs=5")


def test_forked_run_keeps_its_checkpoint(site: Site) -> None:
    """It is a hard link: the run from which it came holds nothing that its removal would free."""
    before = json.loads(site.hpc("clean", "complete", "--json").stdout)["bytes"]
    linked = site.path / "linked"
    shutil.copytree(site.path / "runs" / "complete" / "checkpoints" / "step-00000400", linked, copy_function=os.link)
    assert json.loads(site.hpc("clean", "complete", "--json").stdout)["bytes"] == before - 2**14
    assert listed(site, "complete", "--yes") == ["complete"]
    assert (linked / "state.safetensors").exists()


def test_running_run_and_that_of_another_user_stay(site: Site) -> None:
    busy, own = RunDir(site.path / "runs" / "busy"), os.getpid()
    shutil.copytree(site.path / "runs" / "small", busy.path)
    shutil.rmtree(busy.events)
    shutil.rmtree(busy.final)
    busy.events.mkdir()
    # Its controller is this process.
    write_events(busy, submitted(job_id=str(own), cluster="local", started=start_time(own)))
    assert f"run busy has job {own}: type hpc cancel busy" in refused(site, "clean", "busy", "--yes")
    if os.getuid() == 0:
        shutil.chown(site.path / "runs" / "small", "nobody")
        assert "belongs to nobody" in refused(site, "clean", "small", "--yes")
    assert "busy" not in listed(site, "--state=completed,failed,cancelled")
    assert "small" not in listed(site) or os.getuid() != 0


def test_end_of_a_jobs_last_process_is_waited_for(site: Site) -> None:
    """The controller of a local run, and the job of a run on Slurm, outlive the run's last event."""
    with subprocess.Popen(["sleep", "3"]) as controller:
        pid = str(controller.pid)
        write_events(
            RunDir(site.path / "runs/small"), submitted(job_id=pid, cluster="local", started=start_time(controller.pid))
        )
        done = site.hpc("clean", "small", "--yes")
    assert (done.returncode, there(site)) == (0, ALL - {"small"}), done.stderr
    assert done.stderr == f"run small is ending: waiting for the end of process {pid}\n"


def test_run_that_is_resumed_while_another_is_removed_stays(site: Site) -> None:
    """It has a job from the moment at which the larger run is gone; the next run has completed meanwhile."""
    runs = site.path / "runs"
    job = f"7|RUNNING|None|n1|n1|0|N/A|N/A|{runs}/complete/submit.sbatch|"
    squeue = f"[ -e {runs}/stopped ] || {{ echo '{job}'; rm -f {runs}/small/events/cancel.jsonl; }}"
    path = write_programs(site.path / "bin", squeue=squeue, sbatch="exit 1", sacct="exit 1")
    for name in ALL:
        (runs / name / "submit.sbatch").touch()
    write_events(RunDir(runs / "small"), cancelled(), file="cancel.jsonl")
    shutil.rmtree(runs / "small" / "final")
    done = site.hpc("clean", "--yes", "--json", *ALL, PATH=path)
    answer = json.loads(done.stdout)
    assert (done.returncode, [one["run"] for one in answer["runs"]]) == (1, ["stopped"])
    assert there(site) == ALL - {"stopped"}
    assert (runs / "complete" / "final").exists()
    assert "run complete has job 7: type hpc cancel complete" in done.stderr
    assert "run small was cancelled and is completed now: repeat hpc clean" in done.stderr


def test_directory_that_cannot_be_renamed_stays_whole(tmp_path: Path) -> None:
    directory = tmp_path / ("n" * 250)
    directory.mkdir()
    (directory / "file").write_text("kept")
    with pytest.raises(OSError, match="File name too long"):
        remove(directory)
    assert (directory / "file").read_text() == "kept"
    remove(tmp_path / "absent")
