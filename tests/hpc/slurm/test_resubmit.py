"""Who submits a run's next job: claims are files, and processes."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from support.cluster import Command

from hpc.core import ledger
from hpc.core.attempts import Attempt
from hpc.core.files import append_json_line
from hpc.core.rundir import RunDir
from hpc.slurm import resubmit
from hpc.spec import Resources, RunSpec

CLAIM = """
import sys
from pathlib import Path
from hpc.core import ledger
from hpc.core.rundir import RunDir
from hpc.slurm import resubmit
run = RunDir(Path(sys.argv[1]))
assert resubmit.claim_next_job(run, 1, ledger.read(run.events))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.events.mkdir()
    return found


def claims(run: RunDir, attempt: int = 1) -> bool:
    return resubmit.claim_next_job(run, attempt, ledger.read(run.events))


def claimed_elsewhere(run: RunDir, seconds_ago: float) -> None:
    line = {"event": "resubmitting", "attempt": 1, "host": "another", "pid": 1, "started": 1}
    append_json_line(run.events / "next-001.jsonl", {"time": time.time() - seconds_ago, **line})


def test_one_claim_at_a_time(run: RunDir) -> None:
    assert claims(run)
    assert not claims(run), "the first one is not done"
    append_json_line(run.events / "x.jsonl", ledger.record("resubmitted", attempt=1, job_id="8", excluded=[]))
    assert claims(run), "its job has ended before it started"


def test_claim_after_another_attempt_is_another_one(run: RunDir) -> None:
    assert claims(run)
    assert claims(run, attempt=2)


def test_claim_of_a_dead_process_has_ended(run: RunDir) -> None:
    subprocess.run([sys.executable, "-c", CLAIM, str(run.path)], check=True)
    assert claims(run)


@pytest.mark.parametrize(("seconds_ago", "free"), [(50.0, False), (150.0, True)])
def test_claim_on_another_host_expires(run: RunDir, seconds_ago: float, free: bool) -> None:
    claimed_elsewhere(run, seconds_ago)
    assert claims(run) is free


def test_expired_claim_has_one_successor(run: RunDir) -> None:
    claimed_elsewhere(run, 150.0)
    seen = ledger.read(run.events)
    with ThreadPoolExecutor() as several:
        found = list(several.map(lambda _: resubmit.claim_next_job(run, 1, seen), range(8)))
    assert sum(found) == 1


LOG = """srun: Job step aborted: Waiting up to 17 seconds for job step to finish.
slurmstepd-gpu01: error: *** STEP 7.0 ON gpu01 CANCELLED AT {at} DUE TO {words} ***
torchrelay: attempt 1 ended
"""


@pytest.mark.parametrize(
    ("words", "seconds", "preempted"),
    [("PREEMPTION", 60, True), ("PREEMPTION", -60, False), ("JOB REQUEUE", 60, False), ("TIME LIMIT", 60, False)],
    ids=["preempted", "an earlier start of the job was", "requeued", "out of time"],
)
def test_preemption_in_the_log_of_the_job(run: RunDir, words: str, seconds: int, preempted: bool) -> None:
    began = time.time() - 300
    run.logs.mkdir()
    at = datetime.fromtimestamp(began + seconds).isoformat(timespec="seconds")  # noqa: DTZ006 - as Slurm prints it
    (run.logs / "7_0_log.out").write_text("x" * 500_000 + LOG.format(at=at, words=words))
    assert resubmit.was_preempted(run, "7", began) is preempted
    assert not resubmit.was_preempted(run, "8", began), "there is no log"


def test_agents_that_were_killed_by_a_preemption_are_not_lost(run: RunDir) -> None:
    """With GraceTime=0 they have no time to record the end."""
    RunSpec(name="r", cluster="slurm", data=None, stage_dir="/tmp", resources=Resources(), script=("a.py",)).save(run)
    last = Attempt(
        attempt=1, job_id="7", restart=0, secret="n", port=1, nodes=("gpu01",), started=time.time() - 300
    )  # fmt: skip
    run.logs.mkdir()
    at = datetime.now().isoformat(timespec="seconds")  # noqa: DTZ005 - as Slurm prints it
    (run.logs / "7_0_log.out").write_text(LOG.format(at=at, words="PREEMPTION"))
    assert resubmit.record_missing_end(run, last, "its job is gone", suspect="gpu01")
    [ended] = ledger.read(run.events)
    assert (ended["cause"], ended.get("node")) == ("preempted", None)


@pytest.mark.parametrize(
    "refusal", ["Requested node configuration is not available", "Invalid node name specified"], ids=["22.05", "24.11"]
)
def test_job_that_needs_an_excluded_node_is_submitted_without_exclusions(
    run: RunDir, slurm_command: Command, refusal: str
) -> None:
    """Such as one with --sbatch nodelist=gpu01,gpu02. In quotes: what sbatch of that release says."""
    run.script.write_text("#!/bin/sh\n")
    slurm_command("squeue", "exit 0")
    refused = f"echo 'sbatch: error: Batch job submission failed: {refusal}' >&2; exit 1"
    slurm_command("sbatch", f'case "$*" in *--exclude*) {refused};; *) echo 9;; esac')
    spec = RunSpec(name="r", cluster="slurm", data=None, stage_dir="/tmp", resources=Resources(), script=("a.py",))
    assert resubmit.submit_next_job(run, spec, ["gpu02"], []) == "9"
