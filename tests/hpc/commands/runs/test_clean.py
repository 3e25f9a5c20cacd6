"""`hpc clean` without Slurm: it lists what runs that have ended hold, and removes what it is told to."""

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import SHORT_LOCAL_CONSTANT_LR, Run, Site, refused, site_without_slurm, submit_and_wait
from support.events import submitted, write_events

from hpc.base.kernel import start_time
from hpc.commands.runs.clean import remove
from hpc.run.rundir import RunDir
from training.relay.checkpoint_files import list_checkpoints

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def trained() -> Iterator[Run]:
    """A complete training."""
    with site_without_slurm() as site:
        yield submit_and_wait(site, *SHORT_LOCAL_CONSTANT_LR, "--name=trained", "--epochs=2")


@pytest.fixture
def site(trained: Run, shared: Path) -> Site:
    """Two complete runs, of which `small` has no checkpoints; `stopped`, cancelled, is larger, and 40 days old."""
    runs = shared / "runs"
    runs.mkdir()
    for name in ("complete", "stopped", "small"):
        shutil.copytree(trained.directory.path, runs / name)
    here = Site(shared, "/nonexistent")
    shutil.rmtree(runs / "small" / "checkpoints")
    shutil.rmtree(runs / "stopped" / "final")
    (runs / "stopped" / "events" / "attempt-001-end.jsonl").unlink()
    (runs / "stopped" / "logs" / "large.log").write_bytes(os.urandom(2**22))
    assert here.hpc("cancel", "stopped").returncode == 0
    age = time.time() - 40 * 86400
    for path in (runs / "stopped").rglob("*"):
        os.utime(path, (age, age))
    os.utime(runs / "stopped", (age, age))
    return here


def listed(site: Site, *arguments: str) -> list[str]:
    """The runs that `hpc clean` names."""
    done = site.hpc("clean", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [one["run"] for one in json.loads(done.stdout)["runs"]]


def there(site: Site) -> set[str]:
    """What is in the directory of the runs."""
    return {path.name for path in (site.path / "runs").iterdir()}


def test_largest_is_first_and_nothing_is_removed_without_yes(site: Site) -> None:
    shown = site.hpc("clean").stdout
    rows = [line.split() for line in shown.splitlines()]
    assert [row[0] for row in rows[1:4]] == ["stopped", "complete", "small"]
    assert [row[1] for row in rows[1:4]] == ["cancelled", "completed", "completed"]
    assert shown.endswith(": --yes removes these runs\n")
    [first, *_] = json.loads(site.hpc("clean", "--json").stdout)["runs"]
    assert first["size"] > first["checkpoints"] + 2**22 > 2**22
    assert there(site) == {"complete", "stopped", "small"}


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--state=cancelled"], ["stopped"]),
        (["--state=failed,cancelled"], ["stopped"]),
        (["--state=failed"], []),
        (["--older-than=30d"], ["stopped"]),
        (["--older-than=50d"], []),
        (["small", "complete"], ["complete", "small"]),
        (["--checkpoints-only", "--state=completed"], ["complete", "small"]),
    ],
)
def test_flags_choose_runs(site: Site, flags: list[str], names: list[str]) -> None:
    assert listed(site, *flags) == names


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--yes"], "--yes alone would remove all 3 runs that have ended: name them, or give --older-than 30d"),
        (["--state=done"], "--state is 'done': use one or several of cancelled,completed,failed"),
        (["--older-than=30"], "--older-than is '30': use a duration such as"),
        (["complet", "--yes"], "there is no run 'complet': existing runs: complete"),
    ],
)
def test_wrong_command_lines_say_what_to_type(site: Site, flags: list[str], says: str) -> None:
    assert says in refused(site, "clean", *flags)
    assert there(site) == {"complete", "stopped", "small"}


def test_only_what_was_asked_for_is_removed_and_what_a_kill_had_left(site: Site) -> None:
    left = site.path / "runs" / f".old.{uuid.uuid4().hex}.removed"
    shutil.copytree(site.path / "runs" / "small", left)
    # The drafts of a submission that was killed long ago, and of one that still runs.
    drafts = [site.path / "runs" / f".halfmade.{uuid.uuid4().hex}.tmp" for _ in range(2)]
    for draft in drafts:
        shutil.copytree(site.path / "runs" / "small", draft)
    part = site.path / "runs" / f".digits.npz.{uuid.uuid4().hex}.tmp"
    part.touch()
    for killed in (drafts[0], part):
        os.utime(killed, (0, 0))
    shown = site.hpc("status").stdout
    assert not any(name in shown for name in ("old", "halfmade")), "a run that is being removed or made is not listed"
    assert listed(site, "--state=cancelled", "--yes") == ["stopped"]
    assert there(site) == {"complete", "small", drafts[1].name}
    shutil.rmtree(drafts[1])


def test_checkpoints_alone(site: Site) -> None:
    path = site.path / "runs" / "complete"
    kept = {file.relative_to(path) for file in path.rglob("*") if "checkpoints" not in file.parts}
    assert listed(site, "complete", "--checkpoints-only", "--yes") == ["complete"]
    assert {file.relative_to(path) for file in path.rglob("*")} == kept
    assert (path / "final" / "model.safetensors").exists()
    assert "so it would start from the beginning: type hpc submit" in refused(site, "resume", "complete", "--epochs=3")
    assert "has no checkpoint in" in refused(site, "fork", "complete", "--name=x", "--epochs=3")


def test_forked_run_keeps_its_checkpoint(site: Site) -> None:
    """It is a hard link: the run from which it came holds nothing that its removal would free."""
    dry: dict[str, Any] = json.loads(site.hpc("clean", "complete", "--json").stdout)
    [newest, *_] = list_checkpoints(site.path / "runs" / "complete" / "checkpoints")
    linked = site.path / "linked"
    shutil.copytree(newest, linked, copy_function=os.link)
    now: dict[str, Any] = json.loads(site.hpc("clean", "complete", "--json").stdout)
    assert now["bytes"] < dry["bytes"]
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


def test_directory_that_cannot_be_renamed_stays_whole(tmp_path: Path) -> None:
    directory = tmp_path / ("n" * 250)
    directory.mkdir()
    (directory / "file").write_text("kept")
    with pytest.raises(OSError, match="File name too long"):
        remove(directory)
    assert (directory / "file").read_text() == "kept"
    remove(tmp_path / "absent")


def test_packages_that_earlier_versions_kept_are_removed_and_runs_keep_theirs(site: Site) -> None:
    """Files of the kept copies are hard links to those of the runs."""
    kept, run = site.path / "runs" / f".packages-{os.getuid()}", site.path / "runs" / "small"
    shutil.copytree(run / "code" / ".torchrelay", kept / "0123456789abcdef", copy_function=os.link)
    alone = kept / "fedcba9876543210" / "hpc" / "__init__.py"
    alone.parent.mkdir(parents=True)
    alone.write_text("of a version that no run has")
    [listed] = json.loads(site.hpc("clean", "--state=failed", "--json").stdout)["packages"]
    assert listed == {"path": str(kept), "size": alone.stat().st_blocks * 512}
    assert kept.is_dir()
    done = site.hpc("clean", "stopped", "--yes")
    assert "removed these runs and these packages" in done.stdout
    assert there(site) == {"complete", "small"}
    assert (run / "code" / ".torchrelay" / "hpc" / "__init__.py").is_file()
    assert "packages" not in site.hpc("clean").stdout
