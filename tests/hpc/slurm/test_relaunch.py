"""Who submits a run's next job: claims are files, and processes."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc.core import ledger
from hpc.core.files import append_json_line
from hpc.core.rundir import RunDir
from hpc.slurm import relaunch

CLAIM = """
import sys
from pathlib import Path
from hpc.core import ledger
from hpc.core.rundir import RunDir
from hpc.slurm import relaunch
run = RunDir(Path(sys.argv[1]))
assert relaunch.claim_next_job(run, 1, ledger.read(run.events))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.events.mkdir()
    return found


def claims(run: RunDir, attempt: int = 1) -> bool:
    return relaunch.claim_next_job(run, attempt, ledger.read(run.events))


def claimed_elsewhere(run: RunDir, seconds_ago: float) -> None:
    line = {"event": "relaunching", "attempt": 1, "host": "another", "pid": 1, "started": 1}
    append_json_line(run.events / "next-001.jsonl", {"time": time.time() - seconds_ago, **line})


def test_one_claim_at_a_time(run: RunDir) -> None:
    assert claims(run)
    assert not claims(run), "the first one is not done"
    append_json_line(run.events / "x.jsonl", ledger.record("relaunched", attempt=1, job_id="8"))
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
        found = list(several.map(lambda _: relaunch.claim_next_job(run, 1, seen), range(8)))
    assert sum(found) == 1
