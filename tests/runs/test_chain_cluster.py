"""Runs that wait for others (`--after`, `--after-ok`) on Slurm, by an ordinary user."""

import pytest
from support.cluster import Run, Site, add_script, refused

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]
ONE = ("--gpus-per-node=1", "--cpus-per-gpu=1")
# It logs as many epochs as it has had attempts, and ends when there is a file.
WAITS = """
import json, os, pathlib, sys, time
metrics = pathlib.Path(os.environ["TORCHRELAY_RUN_DIR"], "metrics")
metrics.mkdir(exist_ok=True)
with open(metrics / "train.jsonl", "a") as file:
    print(json.dumps({"step": 1, "epoch": int(os.environ["TORCHRELAY_ATTEMPT"])}), file=file)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.2)
sys.exit(pathlib.Path(sys.argv[1]).read_text() or 0)
"""


def waiting(site: Site, name: str, *flags: str) -> Run:
    """A run that has nothing to do but to wait."""
    add_script(site, "b.py", "print('b')\n")
    return site.submit(*ONE, f"--name={name}", *flags, "--", "b.py")


def endless(site: Site, name: str, *flags: str) -> Run:
    """A run that has begun, and ends when there is the file `end`."""
    add_script(site, "a.py", WAITS)
    run = site.submit(*ONE, f"--name={name}", *flags, "--", "a.py", str(site.path / "end"))
    run.wait("its start", lambda: run.events("rendezvous"))
    return run


def end(site: Site, message: str = "") -> None:
    """Have it end: with a message, it fails."""
    (site.path / "new").write_text(message)
    (site.path / "new").rename(site.path / "end")


def waits_for(run: Run) -> str:
    """Slurm's dependency of its job."""
    return run.queue("%E")


def assert_began_after(run: Run, other: Run) -> None:
    """It is complete, in one attempt, that began when the other run had ended."""
    run.wait_for_state("completed")
    (claim,) = run.events("claimed")
    assert claim["time"] >= other.events("attempt_ended")[-1]["time"]


def test_runs_begin_when_others_are_complete_though_these_are_requeued(ordinary_user: Site) -> None:
    """One whose job begins too early, because somebody has removed its dependency, goes back into the queue."""
    site = ordinary_user
    first = endless(site, "first")
    second, third = waiting(site, "second", "--after-ok=first"), waiting(site, "third", "--after=second")
    early = waiting(site, "early", "--after=first", "--nodes=2")
    unfulfilled = f"afterany:{first.job_id}(unfulfilled)"
    assert [waits_for(run) for run in (second, third, early)] == [
        unfulfilled,
        f"afterany:{second.job_id}(unfulfilled)",
        unfulfilled,
    ]
    assert "pending: waits until run first has completed" in site.hpc("status", "second").stdout
    first.wait("its first attempt", lambda: first.events("claimed"))
    site.slurm("scontrol", "requeue", first.job_id)
    first.wait_for_next_job()
    first.wait("its second attempt", lambda: len(first.events("claimed")) == 2)
    assert second.queue("%T %r") == "PENDING Dependency"
    unfulfilled = f"afterany:{first.job_id}(unfulfilled)"
    assert waits_for(second) == unfulfilled, "its job was replaced"
    site.slurm("scontrol", "update", f"JobId={early.job_id}", "Dependency=")
    early.wait("its start", lambda: early.events("refused"))
    early.wait("the dependency", lambda: waits_for(early) == unfulfilled)
    assert early.status()["state"] == "pending"
    end(site)
    first.wait_for_state("completed")
    assert_began_after(second, first)
    assert_began_after(third, second)
    with site.supervised():
        assert_began_after(early, first)
    assert not [*second.events("refused"), *third.events("refused")]
    assert [run.status()["waits_for"] for run in (second, third)] == [[], []]


def test_run_is_held_while_one_that_must_be_complete_has_failed(ordinary_user: Site) -> None:
    site = ordinary_user
    first = endless(site, "first")
    ok, any_end = waiting(site, "ok", "--after-ok=first"), waiting(site, "any", "--after=first")
    end(site, "broken")
    assert_began_after(any_end, first)
    assert first.wait_for_state("failed")
    ok.wait("the hold", lambda: ok.queue("%r") == "job requeued in held state")
    says = "pending: run first, which must be complete first, has failed: type hpc resume first"
    ok.wait("its explanation", lambda: says in " ".join(site.hpc("status", "ok").stdout.split()))
    assert not ok.events("claimed")
    assert "would never begin: run first" in refused(site, "submit", *ONE, "--after-ok=first", "--", "b.py")

    (site.path / "end").unlink()
    assert site.hpc("resume", "first").returncode == 0
    job_id = first.status()["job_id"]
    assert waits_for(ok) == f"afterany:{job_id}(unfulfilled)"
    end(site)
    with site.supervised():  # it ends the two minutes that Slurm holds a requeued job
        assert_began_after(ok, first)


def test_run_is_released_while_the_start_that_was_held_still_ends(ordinary_user: Site) -> None:
    """Slurm takes seconds to end a job that has been requeued and held, and forgets no release meanwhile."""
    site = ordinary_user
    first = waiting(site, "first", "--sbatch=hold")
    second = waiting(site, "second", "--after=first", "--sbatch=hold")
    for run in (first, second):
        site.slurm("scancel", run.job_id)
    slow = '#!/bin/bash\ntrap "" TERM\nscontrol requeuehold "$SLURM_JOB_ID"\nsleep 60\n'
    second.directory.script.write_text(slow)
    job_id = site.slurm("sbatch", "--parsable", "--requeue", "--output=/dev/null", str(second.directory.script))

    def queue(columns: str) -> str:
        return site.slurm("squeue", "--noheader", f"--job={job_id}", f"--format={columns}")

    second.wait("the hold", lambda: queue("%T %r") == "COMPLETING job requeued in held state")
    assert site.hpc("cancel", "first").returncode == 0
    second.wait("its end", lambda: queue("%T") == "PENDING")
    assert queue("%r") != "job requeued in held state"
