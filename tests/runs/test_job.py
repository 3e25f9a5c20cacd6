"""The main job on a real Slurm: it trains, and it goes on after whatever interrupts it."""

import csv
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import ENDLESS, SMALL_BATCH, TWO_NODES, Run, Site, ranks_of, refused

from hpc.core import ledger
from hpc.core.rundir import RunDir
from hpc.slurm.client import TESTBED_DIRECTORY

ONE_RANK = ("--gpus-per-node=1", "--cpus-per-gpu=1", "--log-every=1")
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def check_complete(site: Site, *arguments: str, ranks: int = 2) -> None:
    """A run of two nodes comes to its end, and everything is where it belongs."""
    done = site.hpc("submit", "--json", "--wait", "--data=data", *SMALL_BATCH, "--epochs=3", *TWO_NODES, *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    answer = json.loads(done.stdout)
    status = answer["status"]
    assert status["state"] == "completed"
    assert status["world_size"] == ranks
    assert status["test_accuracy"] > 0.5
    assert [attempt["cause"] for attempt in status["attempts"]] == ["completed"]
    nodes = status["attempts"][0]["nodes"]
    assert len(set(nodes)) == 2

    run = Path(answer["run_dir"])
    assert run.stat().st_mode & 0o777 == 0o700
    events = ledger.read(run / "events")
    assert sorted(event["node"] for event in events if event["event"] == "staged") == sorted(nodes)
    logs = sorted(path.name for path in run.glob("logs/attempt-001/*.log"))
    assert logs == [f"rank-0{rank}.log" for rank in range(ranks)]
    with (run / "final" / "confusion.csv").open() as file:
        counted = sum(int(cell) for row in list(csv.reader(file))[1:] for cell in row[1:])
    assert counted == 500, "every test image once"
    assert (run / "code" / ".torchrelay" / "hpc" / "submit" / "__main__.py").is_file()


def test_main_job_as_root_and_its_logs_of_one_rank_and_attempt(site: Site) -> None:
    check_complete(site, "--gpus-per-node=2", "--name=logged", ranks=4)
    everything = site.hpc("logs", "logged").stdout
    assert "\n[1:0" in everything
    assert site.hpc("logs", "logged", "--rank=0").stdout.startswith("[1:0")
    assert "run logged has one attempt, 1" in refused(site, "logs", "logged", "--attempt=2")
    lines = json.loads(site.hpc("logs", "logged", "--json", "--rank=0").stdout)
    assert {(line["attempt"], line["rank"]) for line in lines} == {(1, 0)}


def test_main_job_as_an_ordinary_user(ordinary_user: Site) -> None:
    check_complete(ordinary_user, "--name=mine")
    assert (ordinary_user.path / "runs" / "mine").owner() == ordinary_user.user


@pytest.mark.parametrize("name", ['it\'s a "run"; $HOME & `x`'])
def test_names_and_paths_that_a_shell_would_take_apart(site: Site, name: str) -> None:
    odd = site.path / "a 'b' $c; d"
    odd.mkdir()
    (site.path / "data").rename(odd / "data")
    inside = Site(odd, site.slurm_conf)
    check_complete(inside, f"--name={name}", f"--runs-dir={odd / 'r $u n s'}")


def check_report(run: Run, stopped: int) -> None:
    """The report of a run that was preempted after a step: what it was made from, and what it cost."""
    answer = json.loads(run.site.hpc("report", str(run.directory.path), "--json").stdout)
    page = Path(answer["report"]).read_text()
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert facts["torch"] == importlib.metadata.version("torch")
    assert facts["Jobs"] == run.job_id
    assert set(facts["Nodes"].split(", ")) >= set(run.nodes())
    assert float(facts["rank-hours"]) > 0
    assert re.search(r"<b>productive [\d.e-]+</b>", page)
    [queue] = set(re.findall(rf"#1 preempted at step {stopped}: ([\w. ]+) in the queue", page))
    assert queue != "0.0 s"


def test_preempted_run_goes_on_at_the_very_next_step(site: Site) -> None:
    run = site.submit("--data=data", *ENDLESS)
    run.wait_for_steps(20)
    urgent = site.slurm("sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive",
                        "--output=/dev/null", "--wrap=sleep 1")  # fmt: skip
    run.wait("the preemption", lambda: run.queue("%T") == "PENDING")
    stopped = run.steps()[-1]
    run.wait("the urgent job", lambda: site.type("squeue", "-h", "-j", urgent).stdout.strip() == "")
    run.wait_for_release()
    run.wait_for_steps(stopped + 20)
    run.assert_no_gap()
    status = run.status()
    assert [attempt["cause"] for attempt in status["attempts"]] == ["preempted", None]
    assert status["attempts"][0]["last_step"] == status["attempts"][1]["first_step"] == stopped
    assert status["steps_lost"] == 0
    assert run.attempts_logged() == [1, 2]
    assert len(run.events("requeued")) == 1
    check_report(run, stopped)
    run.cancel()


def test_preemption_without_grace_is_one(site: Site) -> None:
    """Slurm requeues the job itself then, and `scontrol show job` has no PreemptTime."""
    run = site.submit("--data=data", *ENDLESS)
    run.wait_for_steps(20)
    site.slurm("scontrol", "update", "PartitionName=gpu", "GraceTime=0")
    try:
        site.slurm("sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null",
                   "--wrap=sleep 1")  # fmt: skip
        run.wait("the preemption", lambda: run.queue("%T") == "PENDING")
        run.wait("the end of the attempt", lambda: run.events("attempt_ended"))
    finally:
        site.slurm("scontrol", "update", "PartitionName=gpu", "GraceTime=20")
    # Now and then slurmstepd says JOB REQUEUE, and nothing else that its user may see tells of the preemption.
    log = (run.directory.logs / f"{run.job_id}_0_log.out").read_text()
    cause = "preempted" if "DUE TO PREEMPTION" in log else "requeued"
    assert [event["cause"] for event in run.events("attempt_ended")] == [cause]
    assert not run.events("requeued")
    run.cancel()


def test_job_of_a_range_of_nodes_gets_as_many_as_are_free(site: Site) -> None:
    run = site.submit("--data=data", *SMALL_BATCH, "--epochs=100000", "--nodes=2:4", *ONE_RANK)
    run.wait("the first step", lambda: run.events("first_step"))
    status = run.status()
    assert (len(status["attempts"][0]["nodes"]), status["world_size"]) == (4, 4)
    run.cancel()


def test_scontrol_requeue(site: Site) -> None:
    run = site.submit("--data=data", *ENDLESS)
    run.wait_for_steps(20)
    site.slurm("scontrol", "requeue", run.job_id)
    run.wait_for_release()
    stopped = run.steps()[-1]
    run.wait_for_steps(stopped + 20)
    run.assert_no_gap()
    status = run.status()
    assert [attempt["cause"] for attempt in status["attempts"]] == ["requeued", None]
    assert status["steps_lost"] == 0
    run.cancel()


def test_time_limit(site: Site) -> None:
    run = site.submit("--data=data", *ENDLESS, "--time=2m")
    run.wait_for_steps(20)
    # Slurm looks at time limits every half a minute.
    site.slurm("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=1")
    run.wait_for_release()
    # A busy machine may need more than the minute before it has made a step.
    site.slurm("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=10")
    stopped = run.steps()[-1]
    run.wait_for_steps(stopped + 5)
    run.assert_no_gap()
    assert run.status()["attempts"][0]["cause"] == "time_limit"
    run.cancel()


def test_script_submitted_by_hand_resumes(site: Site) -> None:
    run = site.submit("--data=data", *ENDLESS, "--gpus-per-node=2")
    run.wait_for_steps(20)
    site.slurm("scancel", run.job_id)
    run.wait("the end of the job", lambda: run.status()["state"] == "cancelled")
    stopped = run.steps()[-1]
    # The variables are those of a shell in a job of another kind.
    shell = {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS_PER_GPU": "1", "SLURM_CPUS_PER_GPU": "1"}
    sbatch = site.type("sbatch", "--parsable", str(run.directory.script), **shell)
    by_hand = sbatch.stdout.strip()
    run.wait_for_steps(stopped + 10)
    run.assert_no_gap()
    environments = [Path(f"/proc/{rank}/environ").read_bytes().split(b"\0") for rank in ranks_of(run)]
    assert [b"SLURM_STEP_GPUS=0,1" in environment for environment in environments] == [True] * 4
    status = run.status()
    assert (status["state"], status["job_id"], status["attempt"]) == ("running", by_hand, 2)
    site.slurm("scancel", by_hand)


def test_submission_from_inside_a_job(site: Site) -> None:
    script = site.path / "inner.sh"
    hpc = f"{sys.executable} -m hpc"
    script.write_text(
        "#!/bin/sh\nexport SLURM_CPU_BIND=mask_cpu:0x1 SBATCH_PARTITION=nowhere\n"
        f"srun -n1 {hpc} submit --data=data {' '.join(TWO_NODES)} {' '.join(SMALL_BATCH)} --epochs=2 --name=inner\n"
    )
    outer = site.slurm("sbatch", "--parsable", "--nodes=1", f"--output={site.path}/outer.log", str(script))
    log = site.path / "outer.log"
    run = Run(site, RunDir(site.path / "runs" / "inner"), outer)
    run.wait("the inner submission", lambda: run.events("submitted"))
    status = run.wait_for_state("completed")
    assert len(set(status["attempts"][0]["nodes"])) == 2, log.read_text()


def test_further_jobs_leave_a_run_that_is_being_trained_or_cancelled_alone(site: Site) -> None:
    run = site.submit("--data=data", *ENDLESS)
    run.wait_for_steps(5)
    second = site.slurm("sbatch", "--parsable", str(run.directory.script))
    log = run.directory.logs / f"{second}_0_log.out"
    run.wait("the refusal", lambda: log.exists() and "is running in job" in log.read_text())
    assert run.status()["attempt"] == 1
    run.cancel()
    assert run.status()["state"] == "cancelled"
    assert not run.events("requeued")
    again = site.slurm("sbatch", "--parsable", str(run.directory.script))
    log = run.directory.logs / f"{again}_0_log.out"
    run.wait("the refusal", lambda: log.exists() and "was cancelled" in log.read_text())
    assert run.status()["state"] == "cancelled"


def test_two_crashes_without_progress_fail_the_run(site: Site) -> None:
    (site.path / "crash.py").write_text("raise SystemExit('no luck')\n")
    for command in (("git", "init", "-q"), ("git", "add", "crash.py")):
        assert site.type(*command).returncode == 0
    run = site.submit("--nodes=2", "--name=crash", "--", "crash.py")
    status = run.wait_for_state("failed")
    [attempt] = status["attempts"]
    assert attempt["cause"] == "crashed"
    assert status["detail"].endswith("exit code 1: no luck")
    assert [event["cause"] for event in run.events("interruption")] == ["crashed"], "torchrun tried once more"
    assert not run.events("requeued")
    logs = site.hpc("logs", "crash", "--all").stdout.splitlines()
    # torchrun may have begun once more before the agents could end it.
    assert sum(bool(re.fullmatch(r"\[1:0 [\d: -]+\] no luck", line)) for line in logs) in {2, 3}
    (site.path / "crash.py").write_text("print('mended')\n")
    resumed = site.hpc("resume", "crash", "--new-code", "--gpus-per-node=2", "--wait")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    status = run.status()
    assert [attempt["cause"] for attempt in status["attempts"]] == ["crashed", "completed"]
    assert status["budget"]["used"] == [], "what was before the resumption no longer counts"
    logs = site.hpc("logs", "crash", "--attempt=2").stdout.splitlines()
    assert sum(line.endswith("] mended") for line in logs) == 4, "on two nodes with two ranks each"


def test_taken_port_is_retried(site: Site) -> None:
    """The port is taken between the agent's test of it and torchrun's use of it."""
    (site.path / "ok.py").write_text("print('trained')\n")
    for command in (("git", "init", "-q"), ("git", "add", "ok.py")):
        assert site.type(*command).returncode == 0
    run = site.submit("--nodes=2", "--name=port", "--", "ok.py")
    thief = None
    try:
        run.wait("the first rendezvous", lambda: run.events("rendezvous"))
        port = run.events("rendezvous")[0]["port"]
        head = run.events("claimed")[0]["nodes"][0]  # not by hpc status: torchrun would be there first
        code = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(300)"
        network = TESTBED_DIRECTORY / "ns" / f"{head}.net"
        thief = subprocess.Popen(["nsenter", f"--net={network}", sys.executable, "-S", "-c", code])
        run.wait_for_state("completed")
    finally:
        if thief is not None:
            thief.send_signal(signal.SIGKILL)
            thief.wait()
    # The preflight, once more on another port, and the script.
    assert [event["round"] for event in run.events("rendezvous")] == [1, 2, 3]
    assert len(run.events("checked")) == 1
