"""A run's directory: made exclusively, filled with what the run needs before it can start. Runs on the login node."""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc.core.code_snapshot import copy_code
from hpc.core.errors import UserError
from hpc.core.rundir import RunDir
from hpc.spec import RunSpec


def new_run(runs_dir: Path, name: str) -> RunDir:
    """The directory that the run will have, which must not exist yet."""
    run = RunDir(runs_dir.expanduser().resolve() / name)
    if os.path.lexists(run.path):
        raise UserError(f"run {name!r} exists already in {runs_dir}: choose another --name, or hpc status {name}")
    return run


@contextmanager
def new_run_directory(run: RunDir) -> Iterator[None]:
    """Create the directory, exclusively and for the user alone; remove every trace if the submission fails.

    Raises:
        UserError: it exists, or cannot be written.
    """
    created = next((path for path in reversed([run.path, *run.path.parents]) if not path.exists()), run.path)
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever can write here can run code as the user.
        run.path.mkdir(mode=0o700)
    except FileExistsError as error:
        raise UserError(f"run {run.name!r} exists already in {run.path.parent}: choose another --name") from error
    except OSError as error:
        shutil.rmtree(created, ignore_errors=True)
        raise _unwritable(run, error) from error
    try:
        yield
    except (UserError, OSError) as error:
        shutil.rmtree(created, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritable(run, error) from error
        raise
    except BaseException:
        # Ctrl-C: once there is a script, a job may have been queued, which then needs its directory.
        if not run.script.exists():
            shutil.rmtree(created, ignore_errors=True)
        raise


def _unwritable(run: RunDir, error: OSError) -> UserError:
    return UserError(f"--runs-dir {run.path.parent} cannot be written: {error}")


def fill(run: RunDir, spec: RunSpec) -> None:
    """Write what the run needs before it can start."""
    for directory in (run.events, run.logs):
        directory.mkdir()
    dataclasses.replace(spec, script=copy_code(run, Path.cwd(), spec.script)).save(run)
