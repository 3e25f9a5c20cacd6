"""Uses private names of submitit and Optuna. Each docstring says in which version of the library we checked them.

tests/hpc/base/test_compat_libraries.py fails if a new version lacks one of them. Runs on the login node.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import submitit

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial


class _OwnCommand:
    """Replaces the pickled function of submitit's executors by our own command. Checked in submitit 1.5.4."""

    def __init__(self, folder: Path, command: str) -> None:
        super().__init__(folder)  # type: ignore[call-arg]  # the next class is one of submitit's executors
        self._task_command = command

    @property
    def _submitit_command_str(self) -> str:
        return self._task_command


class SubmititSlurm(_OwnCommand, submitit.SlurmExecutor):
    """submitit's writer of sbatch scripts, with our own task command."""

    def script(self) -> str:
        """Return the text of the sbatch script."""
        return self._make_submission_file_text(self._task_command, "")


class SubmititLocal(_OwnCommand, submitit.LocalExecutor):
    """submitit's local executor, with our own task command."""

    def start(self) -> str:
        """Start submitit's controller and return its process id, which is the job's id."""
        return str(self._submit_command(self._task_command).job_id)


def running_trial(study: "Study", trial: "FrozenTrial") -> "Trial":
    """Return a Trial that reports values of a stored trial. Optuna 5.0 has no public function for this."""
    from optuna import Trial  # noqa: PLC0415 - an optional package

    return Trial(study, trial._trial_id)
