"""What the supervisor has Slurm's commands do, which are shell scripts here."""

import time
from pathlib import Path

import pytest
from support.cluster import Command
from support.events import attempt_ended, claimed, recorded_run, records_in

from hpc.base.errors import TorchrelayError
from hpc.base.files import write_atomic
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm.executor import SlurmExecutor
from hpc.supervise.decide import Action, Decision
from hpc.supervise.observe import observe
from hpc.supervise.perform import perform

RESUBMIT = Decision(action=Action.RESUBMIT, reason="its job is gone")


@pytest.fixture(autouse=True)
def slurm(slurm_command: Command) -> None:
    for name in ("squeue", "sinfo", "scontrol", "srun"):
        slurm_command(name, "exit 0")
    slurm_command("sbatch", "echo 8")


def submitted(path: Path) -> RunDir:
    """A run whose only job is gone."""
    run = recorded_run(path, claimed(time.time() - 900), attempt_ended(time.time() - 800, "preempted"))
    write_atomic(run.script, SlurmExecutor(run, RunSpec.load(run)).script())
    return run


def resubmitted(run: RunDir) -> list[str]:
    perform(observe(run, {}, time.time()), RESUBMIT)
    return [event["job_id"] for event in records_in(run.events) if event["event"] == "resubmitted"]


@pytest.mark.parametrize("name", ["it's", "a b", 'say "run"', "$HOME"])
def test_any_name_of_a_directory_is_found_in_the_script(name: str, tmp_path: Path) -> None:
    assert resubmitted(submitted(tmp_path / name / "run")) == ["8"]


def test_copy_is_refused_though_its_name_begins_the_others(tmp_path: Path) -> None:
    run = submitted(tmp_path / "run-2")
    run.path.rename(tmp_path / "run")
    with pytest.raises(TorchrelayError, match="is this one a copy, or was it moved"):
        resubmitted(RunDir(tmp_path / "run"))


def test_job_that_may_not_be_requeued_is_replaced(tmp_path: Path, slurm_command: Command) -> None:
    run = submitted(tmp_path / "run")
    slurm_command("scontrol", "test $1 != requeue || { echo 'Requested operation is presently disabled' >&2; exit 1; }")
    requeue = Decision(action=Action.REQUEUE, job_id="7", reason="a node failed", cause=None)
    perform(observe(run, {}, time.time()), requeue)
    [resubmitted] = [event for event in records_in(run.events) if event["event"] == "resubmitted"]
    assert resubmitted["job_id"] == "8"
