"""Makes the run directory and queues the run: whole, or nothing is left behind. Runs on the login node."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.core.errors import TorchrelayError, UserError
from hpc.core.files import write_atomic
from hpc.core.git import is_listed_as_untracked
from hpc.core.kernel import start_time
from hpc.core.ledger import EventWriter
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from hpc.slurm.executor import SlurmExecutor, start_local
from hpc.spec import RunSpec
from hpc.staging.python_environment import this_environment
from hpc.submit import environment_archive
from hpc.submit.code_copy import UserCode, copy_code
from hpc.submit.options import SubmitOptions
from hpc.submit.package_copy import keep_packages
from hpc.submit.plan import find_user_code, plan, warn
from hpc.tracking.submission import at_trackers


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A run that has been submitted, or, in a dry run, could be."""

    run: RunDir
    spec: RunSpec
    job_id: str | None = None

    @property
    def answer(self) -> dict[str, Any]:
        """The document of `hpc submit --json`."""
        script = str(self.run.script) if self.spec.cluster == "slurm" else None
        return {
            "run": self.run.name, "run_dir": str(self.run.path), "job_id": self.job_id, "cluster": self.spec.cluster,
            "script": script,
        }  # fmt: skip


def start_run(
    options: SubmitOptions,
    script: tuple[str, ...],
    fill: Callable[[RunDir, RunSpec], RunSpec] = lambda _, spec: spec,
    code: UserCode | None = None,
) -> NewRun:
    """Check, make the run directory, submit; a dry run only checks.

    `fill` puts into the new directory what the run begins with, and returns the spec with it (`hpc fork`). `code` is
    the user's, if it is not that of the current directory.

    Raises:
        UserError: a flag is wrong, or Slurm refuses the job.
        TorchrelayError: Slurm or a tracker does not answer.
    """
    # What the run is made of must be writable by its user alone (hpc.core.ownership). The job inherits this.
    os.umask(os.umask(0) | 0o022)
    run, spec = plan(options, script)
    code = code or find_user_code(options, spec)
    spec = dataclasses.replace(spec, script=code.script, in_place=str(code.root) if code.in_place else None)
    warn(options, spec, code)
    environment = this_environment() if options.stage_env else None
    if options.dry_run:
        return NewRun(run=run, spec=spec)
    if environment is not None:
        watch = None if options.json else environment_archive.show_progress
        archive = environment_archive.find_or_make(environment, run.path.parent, watch)
        spec = dataclasses.replace(spec, stage_env=str(archive))
    with new_run_directory(run), at_trackers(run, spec) as known:
        run.events.mkdir()
        run.logs.mkdir()
        spec = fill(run, known)
        spec.save(run)
        copy_code(run, code)
        job_id = SlurmExecutor(run, spec).start() if spec.cluster == "slurm" else start_local(run)
    _record_submission(run, spec, job_id)
    _prepare_later_runs(run)
    return NewRun(run=run, spec=spec, job_id=job_id)


@contextmanager
def new_run_directory(run: RunDir) -> Iterator[None]:
    """Make the directory, the user's alone; removed if the submission fails. Raises UserError if it cannot be made.

    Of the directories above it, those that were made for it are removed too, unless other runs are in them by then.
    """
    made = [directory for directory in run.path.parents if not directory.exists()]
    try:
        _make_directory(run.path)
    except FileExistsError as error:
        raise UserError(f"run {run.name!r} exists already in {run.path.parent}: choose another --name") from error
    except OSError as error:
        _remove_empty(made)
        raise _cannot_write(run, error) from error
    try:
        yield
    except BaseException as error:
        # After Ctrl-C, a job may have been queued once there is a script, and needs the directory.
        if isinstance(error, (UserError, OSError)) or not run.script.exists():
            shutil.rmtree(run.path, ignore_errors=True)
            _remove_empty(made)
        if isinstance(error, OSError):
            raise _cannot_write(run, error) from error
        raise


def _make_directory(path: Path) -> None:
    """Make a directory, and those above it that are missing."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another submission, which failed, may just have removed the parent that it had made.
        with suppress(FileNotFoundError):
            # Who can write to it can run code as the user.
            path.mkdir(mode=0o700)
            return


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories, the innermost first, as far as they are empty."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _cannot_write(run: RunDir, error: OSError) -> UserError:
    return UserError(f"--runs-dir {run.path.parent} is not writable: {error}")


def _prepare_later_runs(run: RunDir) -> None:
    """Keep our packages for them, and have git ignore the runs of a repository. The run does not depend on it."""
    try:
        keep_packages(run)
        if is_listed_as_untracked(run.path):
            write_atomic(run.path.parent / ".gitignore", "*\n")
    except OSError as error:
        print(f"hpc submit: warning: {run.path.parent} cannot be written: {error}", file=sys.stderr)


def _record_submission(run: RunDir, spec: RunSpec, job_id: str) -> None:
    grace_seconds = None
    if spec.cluster == "slurm" and spec.resources.partition is not None:
        with suppress(TorchrelayError):  # without it, `hpc status` lacks a warning
            grace_seconds = slurm.grace_seconds(slurm.show_partition(spec.resources.partition))
    EventWriter(run.events / "submit.jsonl").append(
        "submitted",
        job_id=job_id,
        cluster=spec.cluster,
        started=start_time(job_id) if spec.cluster == "local" else None,
        stop_lead_seconds=spec.stop_lead_seconds,
        grace_seconds=grace_seconds,
    )
