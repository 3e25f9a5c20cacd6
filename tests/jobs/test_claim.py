"""Who starts an attempt, with Slurm's commands as shell scripts that answer as Slurm did."""

import os
import time
from pathlib import Path

import pytest
from cluster import Command

from hpc.core import ledger
from hpc.core.attempts import attempts_of
from hpc.core.errors import TorchrelayError
from hpc.core.files import append_json_line
from hpc.core.rundir import RunDir
from hpc.spec import Cluster, Resources, RunSpec
from jobs import claim, node_attempt
from jobs.node_attempt import NodeAllocation

AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def run_with_a_lost_attempt(tmp_path: Path, cluster: Cluster, began: float) -> RunDir:
    """A run whose only attempt has no end."""
    run = RunDir(tmp_path / "r")
    run.events.mkdir(parents=True)
    RunSpec(name="r", cluster=cluster, data=None, stage_dir="/tmp", resources=Resources(), script=("a.py",)).save(run)
    claimed = {"attempt": 1, "job_id": "7", "restart": 0, "secret": "n", "port": 1, "nodes": ["gpu01"]}
    append_json_line(run.events / "attempt-001-node-00.jsonl", {"time": began, "event": "claimed", **claimed})
    return run


def allocation(cluster: str, job_id: str = "8") -> NodeAllocation:
    return NodeAllocation(cluster=cluster, job_id=job_id, restart=0, node_rank=0, hostnames=("gpu01",), cpus=1)


def test_lost_attempt_lasted_until_its_last_heartbeat(tmp_path: Path) -> None:
    began = time.time() - 3600
    run = run_with_a_lost_attempt(tmp_path, "local", began)
    run.alive.touch()
    os.utime(run.alive, (began + 3000,) * 2)
    assert claim.claim_next(run, allocation("local"), 1, "m").attempt == 2
    lost = attempts_of(ledger.read(run.events))[0]
    assert lost.cause == "lost"
    assert lost.ended == pytest.approx(began + 3000, abs=60), "it ran for 3000 s without an event"


def test_heartbeat_of_the_attempt_before_is_none_of_a_lost_one(tmp_path: Path) -> None:
    began = time.time() - 3600
    run = run_with_a_lost_attempt(tmp_path, "local", began)
    run.alive.touch()
    os.utime(run.alive, (began - 3000,) * 2)
    claim.claim_next(run, allocation("local"), 1, "m")
    assert attempts_of(ledger.read(run.events))[0].ended == began


def test_controller_that_is_away_is_waited_for(
    tmp_path: Path, slurm_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time() - 3600)
    slurm_command("sinfo", "echo 'gpu01|down'")
    slurm_command("squeue", f"test -e {tmp_path}/back && exit 0; touch {tmp_path}/back; {AWAY}")
    monkeypatch.setattr(node_attempt, "_RETRY_SECONDS", 0.1)
    assert claim.claim_next(run, allocation("slurm"), 1, "m").attempt == 2
    lost = attempts_of(ledger.read(run.events))[0]
    assert (lost.cause, lost.detail) == ("node_failure", "ended without reporting (node lost?); down: gpu01")


def test_controller_that_stays_away_is_an_error(
    tmp_path: Path, slurm_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time() - 3600)
    slurm_command("squeue", AWAY)
    monkeypatch.setattr(claim, "_CONTROLLER_SECONDS", 0.0)
    with pytest.raises(TorchrelayError, match="Unable to contact"):
        claim.claim_next(run, allocation("slurm"), 1, "m")


def test_job_of_the_run_that_runs_is_not_waited_for(tmp_path: Path, slurm_command: Command) -> None:
    run = run_with_a_lost_attempt(tmp_path, "slurm", time.time() - 3600)
    slurm_command("squeue", f"echo '7|RUNNING|None|gpu01|0|N/A|N/A|{run.script}|'")
    with pytest.raises(TorchrelayError, match="is running in job 7"):
        claim.claim_next(run, allocation("slurm"), 1, "m")
