"""Uses private names of other libraries. Each use says in which version of the library we checked it.

tests/hpc/base/test_compat_libraries.py says which of them a new version lacks. Runs on the login node.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import submitit

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial


class SubmititSlurm(submitit.SlurmExecutor):
    """submitit's executor, with a task command and an sbatch command of our own in place of a pickled function.

    Read in submitit 1.5.4, whose public `submit` takes functions only.
    """

    def __init__(self, folder: Path, command: str, sbatch: Callable[[Path], list[str]]) -> None:
        super().__init__(folder)
        self._task_command, self._sbatch = command, sbatch

    @property
    def _submitit_command_str(self) -> str:
        return self._task_command

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return self._sbatch(submission_file_path)

    def script(self) -> str:
        """Return the text of the sbatch script."""
        return self._make_submission_file_text(self._task_command, "")

    def submit_script(self) -> str:
        """Submit the sbatch script and return the job's id. Raises submitit's FailedJobError."""
        return str(self._submit_command(self._task_command).job_id)


class SubmititLocal(submitit.LocalExecutor):
    """submitit's executor on this machine, with a command in place of a pickled function. Read in submitit 1.5.4."""

    def __init__(self, folder: Path, command: str) -> None:
        super().__init__(folder)
        self._task_command = command

    @property
    def _submitit_command_str(self) -> str:
        return self._task_command

    def start(self) -> str:
        """Start submitit's controller and return its process id, which is the job's id."""
        return str(self._submit_command(self._task_command).job_id)


def running_trial(study: "Study", trial: "FrozenTrial") -> "Trial":
    """Return a trial that an earlier process began, so that this one can report to it. Optuna 5.0 has no public way."""
    from optuna import Trial  # noqa: PLC0415 - an optional package

    return Trial(study, trial._trial_id)
