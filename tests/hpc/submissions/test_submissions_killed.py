"""A killed `hpc submit` leaves no run, or a complete one for which all verbs say what to type."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Site, add_script
from support.fake_slurm import HANGS, SBATCH, kill_when_reached, queueing_site, replace, started
from support.forked_hpc import run_forked

pytestmark = pytest.mark.timeout(400)
SUBMIT = ("submit", "--synthetic", "--name=run", "--gpus-per-node=1", "--batch-size=8")
LOCAL = ("submit", "--name=run", "--cluster=local", "--cpus-per-gpu=1", "--in-place", "--", "waits.py")
# Kills itself just before one of its changes to files below runs/ or one of its starts of a process.
KILLED = """
import atexit, os, signal, sys
moments, wanted = 0, {}
def watch(event, arguments):
    global moments
    written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if event in {{"os.mkdir", "os.rename", "os.remove", "os.link"}} or written:
        path = str(arguments[0])
        if "/runs" not in path or "/code" in path:
            return
    elif event != "subprocess.Popen":
        return
    moments += 1
    if moments == wanted:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
atexit.register(lambda: print(moments))
"""


@pytest.fixture
def here(shared: Path) -> tuple[Site, dict[str, str]]:
    """A site whose Slurm consists of shell scripts, and the environment that uses it."""
    return queueing_site(shared)


def rows(site: Site, environment: dict[str, str], *names: str) -> list[dict[str, Any]]:
    done = site.hpc("status", "--json", *names, **environment)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def assert_never_submitted(site: Site, environment: dict[str, str]) -> None:
    """Assert that `hpc status` of the run and of all runs agree."""
    for row in (*rows(site, environment, "run"), *rows(site, environment)):
        assert (row["run"], row["state"], row["job_id"]) == ("run", "failed", None)
        assert "submit it with hpc resume" in row["reason"]


def test_killed_before_the_run_directory_is_whole(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    replace(site, "git", f'if ls -d {{0}}/runs/.run.*.tmp >&2; then {HANGS}; fi; exec {shutil.which("git")} "$@"')
    kill_when_reached(site, environment, *SUBMIT)
    assert rows(site, environment) == []
    for verb in ("status", "resume", "cancel"):
        done = site.hpc(verb, "run", **environment)
        assert (done.returncode, "there is no run 'run'" in done.stderr) == (2, True), done.stderr
    replace(site, "git", None)
    done = site.hpc(*SUBMIT, **environment)
    assert done.returncode == 0, done.stderr
    assert [row["job_id"] for row in rows(site, environment)] == ["1"]


def test_killed_before_sbatch_queued_the_job(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    replace(site, "sbatch", HANGS)
    kill_when_reached(site, environment, *SUBMIT)
    assert_never_submitted(site, environment)
    replace(site, "sbatch", SBATCH)
    # `hpc resume` continues a cancelled run, as `hpc cancel` says.
    done = site.hpc("cancel", "run", **environment)
    assert "resume run continues it" in done.stdout
    assert rows(site, environment)[0]["state"] == "cancelled"
    done = site.hpc("resume", "run", **environment)
    assert done.returncode == 0, done.stderr
    assert [(row["state"], row["job_id"]) for row in rows(site, environment)] == [("pending", "1")]
    done = site.hpc("resume", "run", **environment)
    assert "has job 1, which is pending" in done.stderr


def test_what_is_about_to_be_submitted_is_pending_and_nobody_else_submits_it(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    replace(site, "sbatch", HANGS)
    with started(site, environment, *SUBMIT):
        found = rows(site, environment)
        done = site.hpc("resume", "run", **environment)
    assert [row["state"] for row in found] == ["pending"]
    assert "another process submits the next job of run run" in done.stderr


def test_local_run_that_was_not_started(shared: Path) -> None:
    site = Site(shared, "/nonexistent")
    add_script(site, "waits.py", "import time; time.sleep(1000)")
    # The process that would start the controller hangs.
    (shared / "hangs").mkdir()
    (shared / "hangs/submitit.py").write_text(
        f"import os, sys\nif 'executor' in str(sys.orig_argv): os.system('{HANGS.format(shared)}')\n"
        f"sys.path.remove('{shared}/hangs'); del sys.modules['submitit']; import submitit\n"
    )
    kill_when_reached(site, {"PYTHONPATH": f"{shared}/hangs"}, *LOCAL)
    assert_never_submitted(site, {})


@pytest.mark.slow
def test_killed_at_each_of_its_moments(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    runs, queued = site.path / "runs", site.path / "queued"

    def submit(moment: int) -> "subprocess.CompletedProcess[str]":
        return run_forked(SUBMIT, site.path, {**os.environ, **environment}, KILLED.format(moment))

    moments = int(submit(0).stdout.split()[-1])
    assert moments > 20
    submitted = set[bool]()
    for moment in range(moments - 19, moments + 1):
        shutil.rmtree(runs)
        queued.unlink(missing_ok=True)
        assert submit(moment).returncode == -signal.SIGKILL
        for row in rows(site, environment):
            submitted.add(queued.exists())
            if queued.exists():
                assert (row["state"], row["job_id"]) == ("pending", "1")
                continue
            assert_never_submitted(site, environment)
            done = site.hpc("resume", "run", **environment)
            assert done.returncode == 0, done.stderr
            assert queued.read_text().splitlines() == [str(runs / "run/submit.sbatch")]
    assert submitted == {True, False}


def test_three_at_once_make_one_run(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    for verb, says in ((SUBMIT, "exists already"), (("resume", "run"), "hpc resume|another process|has job")):
        several = [
            subprocess.Popen(
                [sys.executable, "-m", "hpc", *verb], cwd=site.path, env={**os.environ, **environment},
                stderr=subprocess.PIPE, text=True,
            )
            for _ in range(3)
        ]  # fmt: skip
        errors = [one.communicate()[1] for one in several]
        assert sorted(one.returncode > 0 for one in several) == [False, True, True], errors
        assert all(any(words in error for words in says.split("|")) for error in errors if error), errors
        assert len((site.path / "queued").read_text().splitlines()) == 1
        (site.path / "queued").unlink()  # the job is gone
    assert [path.name for path in (site.path / "runs").glob("[!.]*")] == ["run"]
