"""The supervisor: what it does, what it leaves alone, and that it never starts a run twice.

On the testbed, and, where a test needs no job that runs, with shell scripts that queue jobs.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.cluster import ROOT, TINY_BATCH, Run, Site, tiny_data
from support.events import attempt_ended, claimed, typed, write_events
from support.fake_slurm import SBATCH, queueing_site, replace, write_programs

pytestmark = pytest.mark.timeout(400)
SLEEP = "#!/bin/sh\n#SBATCH --output=/dev/null --job-name=sleep --partition=gpu --requeue\nexec sleep 600  # {}\n"
RANK_PER_NODE = ("--data=data", *TINY_BATCH, "--log-every=1", "--gpus-per-node=1", "--cpus-per-gpu=1")


def crippled(site: Site, name: str, *, holds_nodes: bool, runs_dir: str = "runs") -> Run:
    """A run that started a quarter of an hour ago and has sent no heartbeat since.

    Its job holds nodes in which nothing works any more, or Slurm has lost it. The next one only sleeps.
    """
    lost = write_programs(site.path / "lost", sbatch="echo Submitted batch job 999999")
    run = site.submit("--data=data", f"--name={name}", f"--runs-dir={runs_dir}", "--nodes=1", PATH=lost)
    run.directory.script.write_text(SLEEP.format(run.directory.path))
    job_id = site.slurm("sbatch", "--parsable", str(run.directory.script)) if holds_nodes else "999999"
    now, submission = time.time(), run.events("submitted")[0]
    (run.directory.events / "submit.jsonl").unlink()
    write_events(run.directory, typed({**submission, "time": now - 1000, "job_id": job_id}), file="submit.jsonl")
    write_events(run.directory, claimed(now - 900, job_id=job_id), file="attempt-001-node-00.jsonl")
    found = Run(site, run.directory, job_id)
    if holds_nodes:
        found.wait("the start", lambda: found.queue("%T") == "RUNNING")
    return found


def supervise(site: Site, *flags: str, **environment: str) -> list[dict[str, Any]]:
    """Check once, which has to succeed."""
    done = site.hpc("supervise", "--once", "--json", *flags, **environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return list(json.loads(done.stdout))


def actions(site: Site, *flags: str, **environment: str) -> dict[str, str]:
    return {line["run"]: line["action"] for line in supervise(site, *flags, **environment)}


@pytest.fixture
def queue(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site whose Slurm queues jobs but starts none."""
    site, environment = queueing_site(shared)
    replace(site, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tiny_data(shared / "data", train=20, test=20)
    return site


def live_jobs(run: Run) -> list[str]:
    lines = run.site.slurm("squeue", "--me", "--noheader", "--states=PENDING,RUNNING", "--format=%A|%o|").splitlines()
    return [line.partition("|")[0] for line in lines if line.endswith(f"|{run.directory.script}|")]


def assert_one_new_job(run: Run) -> None:
    [job_id] = live_jobs(run)
    assert job_id != run.job_id
    assert [event["job_id"] for event in run.events("resubmitted")] in ([job_id], []), "killed before it was recorded"
    [ended] = run.events("attempt_ended")
    assert ended["cause"] == "lost"


def test_killed_at_any_step_the_next_one_ends_what_was_begun(site: Site) -> None:
    cases = {}
    for step in ("sinfo", "sbatch", "scancel"):
        for when in ("before", "after"):
            name, real = f"{step}-{when}", shutil.which(step)
            # Only what holds nodes has a job that is to be ended.
            run = crippled(site, "run", holds_nodes=step == "scancel", runs_dir=name)
            text = f'kill -9 $PPID; exec {real} "$@"' if when == "before" else f'{real} "$@"; kill -9 $PPID'
            cases[name] = run, write_programs(site.path / f"kills-{name}", **{step: text})

    def recover(name: str) -> None:
        run, path = cases[name]
        killed = site.hpc("supervise", "--once", f"--runs-dir={name}", PATH=path)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        supervise(site, f"--runs-dir={name}")
        run.wait("the end of the old job", lambda: run.job_id not in live_jobs(run))
        assert_one_new_job(run)
        assert actions(site, f"--runs-dir={name}") == {"run": "keep"}
        assert_one_new_job(run)

    with ThreadPoolExecutor() as all_at_once:
        list(all_at_once.map(recover, cases))


def test_several_at_once_start_each_run_once(queue: Site) -> None:
    runs = [crippled(queue, f"run-{number}", holds_nodes=False) for number in range(3)]
    replace(queue, "sbatch", f"exec 9>{{0}}/lock; flock 9; {SBATCH}")  # numbers its jobs though several call it at once
    command = [sys.executable, "-m", "hpc", "supervise", "--once"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    several = [subprocess.Popen(command, cwd=queue.path, env=environment) for _ in range(3)]
    assert [one.wait() for one in several] == [0, 0, 0]
    for run in runs:
        assert_one_new_job(run)


def test_squeue_that_cannot_be_trusted_starts_nothing(queue: Site) -> None:
    run = queue.submit(*RANK_PER_NODE, "--name=waits", "--nodes=1", "--sbatch", "begin=now+1hour")
    odd = queue.path / "odd"
    for answer in (f"echo '77|QUANTUM|None||0|N/A|N/A|{run.directory.script}|'", ":"):
        assert actions(queue, PATH=write_programs(odd, squeue=answer)) == {"waits": "keep"}
    path = write_programs(odd, squeue="echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    done = queue.hpc("supervise", "--once", "--json", PATH=path)
    assert done.returncode == 1
    assert "Unable to contact" in done.stderr
    assert live_jobs(run) == [run.job_id]


def test_damaged_spec_of_a_queued_run_does_not_stop_the_others(queue: Site) -> None:
    waiting = queue.submit(*RANK_PER_NODE, "--name=waiting", "--nodes=1", "--exclude=gpu04")
    crippled(queue, "lost", holds_nodes=False)
    waiting.directory.spec.write_text("{}")
    assert actions(queue) == {"lost": "resubmit"}


def test_dry_run_does_nothing_and_a_run_that_is_cancelled_while_it_has_no_job_stays_cancelled(queue: Site) -> None:
    run = crippled(queue, "run", holds_nodes=False)
    write_events(run.directory, attempt_ended(None, "crashed", step=0))
    before = sorted(path.name for path in run.directory.events.iterdir())
    assert actions(queue, "--dry-run") == {"run": "resubmit"}
    assert live_jobs(run) == []
    assert sorted(path.name for path in run.directory.events.iterdir()) == before
    run.site.hpc("cancel", str(run.directory.path))
    assert actions(queue) == {"run": "keep"}
    assert run.status()["state"] == "cancelled"


def test_next_job_does_not_wait_for_what_the_first_one_waited_for(site: Site) -> None:
    failed = site.slurm("sbatch", "--parsable", "--output=/dev/null", "--wrap=exit 1")
    run = crippled(site, "run", holds_nodes=False)
    script = run.directory.script.read_text().replace("#SBATCH ", f"#SBATCH --dependency=afterok:{failed} ", 1)
    run.directory.script.write_text(script)
    run.wait("the failure", lambda: site.type("squeue", "-h", "-j", failed).stdout.strip() == "")
    assert actions(site) == {"run": "resubmit"}
    [job_id] = live_jobs(run)
    run.wait("the start", lambda: "RUNNING" in site.slurm("squeue", "-h", "-j", job_id, "-o", "%T %r"))


def test_job_that_its_user_cancelled_stays_cancelled(site: Site) -> None:
    run = site.submit(*RANK_PER_NODE, "--name=unwanted", "--nodes=1", "--sbatch", "begin=now+1hour")
    site.slurm("scancel", run.job_id)
    silent = crippled(site, "silent", holds_nodes=True)
    site.slurm("scancel", silent.job_id)
    silent.wait("the end", lambda: not silent.is_alive())
    assert run.status()["state"] == "cancelled", "squeue still lists it"
    assert actions(site) == {"unwanted": "record", "silent": "record"}
    assert silent.status()["state"] == "cancelled"
    assert actions(site) == {"unwanted": "keep", "silent": "keep"}
    assert not live_jobs(run) + live_jobs(silent)


def test_job_that_slurm_could_not_start_is_released(site: Site, ordinary_user: Site) -> None:
    write_programs(site.path, prolog="exit 1")
    configuration = Path(site.slurm_conf)
    before = configuration.read_text()
    configuration.write_text(f"{before}\nProlog={site.path}/prolog\n")
    try:
        site.slurm("scontrol", "reconfigure")
        run = ordinary_user.submit(*RANK_PER_NODE, "--epochs=2", "--name=held", "--nodes=1")
        run.wait("the hold", lambda: "held" in run.queue("%r"))
    finally:
        configuration.write_text(before)
        site.slurm("scontrol", "reconfigure")
        drained = ("sinfo", "--noheader", "--Node", "--states=drain", "--format=%N")
        for node in set(site.slurm(*drained).split()):
            # 24.11 refuses it for a node that its restarted slurmd has made available already.
            site.type("scontrol", "update", f"NodeName={node}", "State=RESUME")
        run.wait("the nodes", lambda: not site.slurm(*drained))
    assert actions(ordinary_user) == {"held": "release"}
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["completed"]
