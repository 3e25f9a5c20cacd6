"""Uses private names of submitit and Optuna. Each docstring says in which version of the library we checked them.

tests/hpc/base/test_compat_libraries.py fails if a new version lacks one of them. Runs on the login node.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import submitit

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial


class SubmititSlurm(submitit.SlurmExecutor):
    """submitit's writer of sbatch scripts, with our own task command instead of a pickled function.

    Checked in submitit 1.5.4.
    """

    def __init__(self, folder: Path, command: str) -> None:
        super().__init__(folder)
        self._task_command = command

    @property
    def _submitit_command_str(self) -> str:
        return self._task_command

    def script(self) -> str:
        """Return the text of the sbatch script."""
        return self._make_submission_file_text(self._task_command, "")


class SubmititLocal(submitit.LocalExecutor):
    """submitit's local executor, with our own task command instead of a pickled function. Checked in submitit 1.5.4."""

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
    """Return a Trial that reports values of a stored trial. Optuna 5.0 has no public function for this."""
    from optuna import Trial  # noqa: PLC0415 - an optional package

    return Trial(study, trial._trial_id)
