"""When the wait for another run (`hpc submit --after`) is over."""

from pathlib import Path

import pytest
from support.events import attempt_ended, claimed, event, recorded_run

from hpc.run.causes import JobState
from hpc.run.spec import RunSpec
from hpc.slurm.predecessors import predecessors_of
from hpc.slurm.squeue import SlurmJob


@pytest.mark.parametrize(
    ("state", "is_over"),
    [(None, True), (JobState.ENDING, True), (JobState.PENDING, False), (JobState.RUNNING, False)],
)
def test_a_run_that_stopped_and_has_a_new_job_goes_on(tmp_path: Path, state: JobState | None, is_over: bool) -> None:
    stopped = event("not_continued", 3.0, attempt=1, detail="refused")
    first = recorded_run(tmp_path / "first", claimed(1.0), attempt_ended(2.0, "preempted"), stopped)
    second = recorded_run(tmp_path / "second", after=(str(first.path),))
    first.script.touch()
    jobs = {}
    if state is not None:
        jobs["8"] = SlurmJob(job_id="8", state=state, reason="", nodes="gpu01", command=str(first.script))
    (found,) = predecessors_of(second, RunSpec.load(second), jobs)
    assert found.is_over == is_over
    assert found.problem is None


def test_a_run_without_a_job_cannot_be_waited_for(tmp_path: Path) -> None:
    first = recorded_run(tmp_path / "first", claimed(1.0), attempt_ended(2.0, "preempted"))
    second = recorded_run(tmp_path / "second", after=(str(first.path),))
    (found,) = predecessors_of(second, RunSpec.load(second), {})
    assert found.problem == "run first, which it waits for, has no job: type hpc resume first, or hpc cancel first"
