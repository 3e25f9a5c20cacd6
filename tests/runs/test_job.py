"""Jobs of a run on a real Slurm: how they end, what the next one does, and what further ones may not.

tests/acceptance has the main job of an ordinary user, and a preempted one.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cluster import (
    ENDLESS,
    SLOW_STEPS,
    SMALL_BATCH,
    TWO_NODES,
    Run,
    Site,
    add_script,
    assert_complete,
    preempt,
    ranks_of,
)

from hpc.run.rundir import RunDir
from hpc.slurm.client import TESTBED_DIRECTORY

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_root_submits_inside_a_job_with_names_that_a_shell_would_take_apart(site: Site) -> None:
    name, odd = 'it\'s a "run"; $HOME & `x`', site.path / "a 'b' $c; d"
    odd.mkdir()
    (site.path / "data").rename(odd / "data")
    runs = odd / "r $u n s"
    flags = ("--data=data", *SMALL_BATCH, "--epochs=3", *TWO_NODES, "--gpus-per-node=2", f"--runs-dir={runs}")
    submit = shlex.join([sys.executable, "-m", "hpc", "submit", "--json", "--wait", *flags, f"--name={name}"])
    script = site.path / "inner.sh"
    script.write_text(
        f"#!/bin/sh\nexport SLURM_CPU_BIND=mask_cpu:0x1 SBATCH_PARTITION=nowhere\ncd {shlex.quote(str(odd))}\n"
        f"srun -n1 {submit} > answer.json\n"
    )
    log = site.path / "outer.log"
    outer = site.slurm("sbatch", "--parsable", "--nodes=1", f"--output={log}", str(script))
    run = Run(Site(odd, site.slurm_conf), RunDir(runs / name), outer)
    run.wait("the end of the outer job", lambda: not site.type("squeue", "-h", "-j", outer).stdout.strip())
    assert (odd / "answer.json").read_text(), log.read_text()
    answer = json.loads((odd / "answer.json").read_text())
    assert answer["run_dir"] == str(run.directory.path)
    assert_complete(run, answer["status"], ranks=4, tested=500)
    assert answer["status"]["test_accuracy"] > 0.5

    # The logs of one rank and attempt.
    path = str(run.directory.path)
    assert "\n[1:0" in site.hpc("logs", path).stdout
    assert site.hpc("logs", path, "--rank=0").stdout.startswith("[1:0")
    lines = json.loads(site.hpc("logs", path, "--json", "--rank=0").stdout)
    assert {(line["attempt"], line["rank"]) for line in lines} == {(1, 0)}


def continued(run: Run, ended: int) -> str:
    """The cause of an attempt's end, once the next one has made the very next steps."""
    run.wait_for_more_steps(ended + 1)
    run.assert_no_gap()
    return str(run.events("attempt_ended")[-1]["cause"])


def assert_refused(run: Run, words: str) -> None:
    """A further job of the run's script says why it starts nothing."""
    job = run.site.slurm("sbatch", "--parsable", str(run.directory.script))
    log = run.directory.logs / f"{job}_0_log.out"
    run.wait("the refusal", lambda: log.exists() and words in log.read_text())


def test_run_goes_on_after_every_end_of_its_job_but_a_cancellation(site: Site) -> None:
    # The user is in another time zone than the nodes.
    zone = {"TZ": "America/Los_Angeles"}
    more = ("--gpus-per-node=2", "--time=20m", "--continue-with=requeue")
    run = site.submit("--data=data", *ENDLESS, *more, **SLOW_STEPS, **zone)
    run.wait_for_more_steps()
    assert_refused(run, "is running in job")
    assert run.status()["attempt"] == 1

    site.slurm("scontrol", "requeue", run.job_id)
    run.wait_for_next_job()
    assert continued(run, 1) == "requeued"

    # Slurm looks at time limits every half a minute.
    site.slurm("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=1")
    run.wait_for_next_job()
    assert continued(run, 2) == "time_limit"
    assert run.status()["steps_lost"] == 0
    requeued = len(run.events("requeued"))

    # Slurm requeues the job itself then, and `scontrol show job` has no PreemptTime.
    preempted = run.job_id
    site.slurm("scontrol", "update", "PartitionName=gpu", "GraceTime=0")
    try:
        preempt(run)
        run.wait("the end of the attempt", lambda: len(run.events("attempt_ended")) == 3)
    finally:
        site.slurm("scontrol", "update", "PartitionName=gpu", "GraceTime=20")
    # Now and then slurmstepd says JOB REQUEUE, and nothing else that its user may see tells of the preemption.
    log = (run.directory.logs / f"{preempted}_0_log.out").read_text()
    cause = "preempted" if "DUE TO PREEMPTION" in log else "requeued"
    run.wait_for_next_job()
    assert continued(run, 3) == cause
    assert len(run.events("requeued")) == requeued

    site.slurm("scancel", run.job_id)
    run.wait("the end of the job", lambda: run.status()["state"] == "cancelled")
    # The variables are those of a shell in a job of another kind.
    shell = {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS_PER_GPU": "1", "SLURM_CPUS_PER_GPU": "1"}
    by_hand = site.type("sbatch", "--parsable", str(run.directory.script), **shell).stdout.strip()
    assert continued(run, 4) == "cancelled"
    environments = [Path(f"/proc/{rank}/environ").read_bytes().split(b"\0") for rank in ranks_of(run)]
    assert [b"SLURM_STEP_GPUS=0,1" in environment for environment in environments] == [True] * 4
    status = run.status()
    assert (status["state"], status["job_id"], status["attempt"]) == ("running", by_hand, 5)

    run.cancel()
    assert_refused(run, "was cancelled")
    assert run.status()["state"] == "cancelled"
    assert len(run.events("requeued")) == requeued


@contextmanager
def taken(port: int, node: str) -> Iterator[None]:
    """A port of a node on which somebody else listens."""
    code = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(300)"
    network = TESTBED_DIRECTORY / "ns" / f"{node}.net"
    with subprocess.Popen(["nsenter", f"--net={network}", sys.executable, "-S", "-c", code]) as thief:
        try:
            yield
        finally:
            thief.kill()


def test_crashing_run_is_given_up_and_goes_on_resumed_though_its_port_is_taken(site: Site) -> None:
    add_script(site, "crash.py", "raise SystemExit('no luck')\n")
    run = site.submit("--nodes=2", "--name=crash", "--", "crash.py")
    status = run.wait_for_state("failed")
    [attempt] = status["attempts"]
    assert attempt["cause"] == "crashed"
    assert status["detail"].endswith("exit code 1: no luck")
    assert not run.directory.final_result.exists()
    run.wait("the end of the job", lambda: not run.is_alive())
    assert "JobState=FAILED" in site.slurm("scontrol", "show", "job", run.job_id)
    assert [event["cause"] for event in run.events("interruption")] == ["crashed"], "torchrun tried once more"
    assert not run.events("requeued")
    logs = site.hpc("logs", "crash", "--all").stdout.splitlines()
    # torchrun may have begun once more before the agents could end it.
    assert logs.count("[1:0] no luck") in {2, 3}

    (site.path / "crash.py").write_text("print('mended')\n")
    before = len(run.events("rendezvous"))
    resumed = site.hpc("resume", "crash", "--new-code", "--gpus-per-node=2")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    run.wait("the first rendezvous", lambda: len(run.events("rendezvous")) > before)
    # Between the agent's test of the port and torchrun's use of it: hpc status would be too slow.
    with taken(run.events("rendezvous")[before]["port"], run.events("claimed")[1]["nodes"][0]):
        status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["crashed", "completed"]
    assert status["budget"] == [], "what was before the resumption no longer counts"
    # The script once more, on another port; its nodes passed the preflight before.
    again = run.events("rendezvous")[before:]
    assert [event["round"] for event in again] == [1, 2]
    assert again[0]["port"] != again[1]["port"]
    assert [event["attempt"] for event in run.events("checked")] == [1]
    logs = site.hpc("logs", "crash", "--attempt=2").stdout.splitlines()
    assert sum(line.endswith("] mended") for line in logs) == 4, "on two nodes with two ranks each"
