"""The common part of `hpc sweep` and `hpc scaling`: makes or finds a group's directory, and follows the runs."""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import is_temporary, new_directory, remove_directory
from hpc.base.text import visible
from hpc.run.ownership import check_is_own
from hpc.run.rundir import RunDir, check_run_name
from hpc.studies.group_dir import GroupDir, GroupSpec
from hpc.submissions.options import SubmitOptions
from hpc.submissions.user_code.code_copy import copy_files
from hpc.submissions.user_code.own_code import UserCode

_POLL_SECONDS = 5.0
_MOST_POLL_SECONDS = 300.0
NOT_OF_GROUPS = frozenset({"dry_run", "wait"})
"""Fields of SubmitOptions that a group does not have."""
Group = TypeVar("Group", bound=GroupDir[Any])
Spec = TypeVar("Spec", bound=GroupSpec)


class GroupController(Protocol):
    """Starts and follows the runs of a group."""

    def step(self) -> bool:
        """Follow the runs, and start further ones. Return whether the group is over."""
        ...

    def write_result(self) -> None:
        """Write the results so far."""
        ...


def typed_flags(words: Sequence[str]) -> set[str]:
    """Return the long flags of a command line, without their dashes and values."""
    return {word[2:].partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}


def directory_of(kind: type[Group], name: str | None, runs_dir: Path) -> Group:
    """Return the directory of the group of this name. Raises UserError if the name is missing or not allowed."""
    if name is None:
        raise UserError(
            f"the {kind.TITLE} has no name: add --name NAME; later, hpc {kind.KIND} --name NAME continues it"
        )
    check_run_name(name)
    return kind(runs_dir.expanduser().resolve() / name)


def check_is_new(group: GroupDir[Any], options: SubmitOptions) -> None:
    """Raise UserError if the group's directory exists, or if --dry-run or --wait is given."""
    kind = group.KIND
    if options.dry_run or options.wait:
        raise UserError(f"hpc {kind} has no --dry-run and no --wait: try hpc submit --dry-run with the same flags")
    if group.path.exists():
        raise _exists(group)


def _exists(group: GroupDir[Any]) -> UserError:
    name, kind = group.path.name, group.KIND
    if group.spec_file.exists():
        return UserError(
            f"{group.TITLE} {name} exists already: type hpc {kind} --name {name} to continue it, or choose another "
            "--name"
        )
    return UserError(f"{group.path} exists already: choose another --name")


def make(group: GroupDir[Spec], spec: Spec, code: UserCode) -> None:
    """Make the directory with the spec and the code. Raises UserError if another process has made it meanwhile."""
    try:
        with new_directory(group.path) as path:
            draft = type(group)(path)
            if not code.in_place:
                copy_files(code, draft.code)
            draft.save(spec)
    except FileExistsError as error:
        raise _exists(group) from error


def go_on(group: GroupDir[Spec], runs_dir: Path, hint: str, **changes: Any) -> Spec:
    """Continue a group: save and return its spec with the changes that are not None, and take back a cancellation.

    Raises:
        UserError: the group does not exist (`hint` says how to start one), is another user's, or has a damaged spec.
    """
    if not group.spec_file.exists():
        raise UserError(f"there is no {group.TITLE} {group.path.name} in {runs_dir}: {hint}")
    check_is_own(RunDir(group.path))
    spec = dataclasses.replace(group.load(), **{name: value for name, value in changes.items() if value is not None})
    group.cancelled.unlink(missing_ok=True)
    group.save(spec)
    return spec


def tell_on(*, as_json: bool) -> Callable[[str], None]:
    """Return a function that prints a line with the time: to stderr if stdout is for JSON (`as_json`)."""
    out = sys.stderr if as_json else sys.stdout
    return lambda line: print(visible(f"{time.strftime('%H:%M:%S')} {line}"), file=out, flush=True)


def look_after(group: GroupDir[Any], controller: GroupController, *, once: bool, is_new: bool) -> None:
    """Let the controller work until the group is over; with `once`, let it work once.

    Raises:
        UserError: the first run cannot be submitted. If `is_new`, the directory is removed, unless it has a run.
        TorchrelayError: Slurm does not answer, and `once` is set; without `once`, the controller tries again.
    """
    try:
        _work(group, controller, once=once)
    except UserError:
        if is_new and not any(is_temporary(path) or RunDir(path).spec.exists() for path in group.path.iterdir()):
            remove_directory(group.path)  # no run was started, and no other process is about to start one
        raise
    except KeyboardInterrupt:
        name = group.path.name
        print(
            f"\nthe runs of {name} continue: type hpc {group.KIND} --name {name} to continue the {group.TITLE}, or "
            f"hpc cancel {name} to stop the runs",
            file=sys.stderr,
        )
        raise


def _work(group: GroupDir[Any], controller: GroupController, *, once: bool) -> None:
    pause, is_over = _POLL_SECONDS, False
    while not is_over:
        try:
            ended, pause = controller.step(), _POLL_SECONDS
            controller.write_result()
            is_over = ended
        except UserError:
            raise
        except (TorchrelayError, OSError) as error:
            if once:
                raise
            pause = min(2 * pause, _MOST_POLL_SECONDS)
            print(f"hpc {group.KIND}: next check in {pause:.0f} s: {error}", file=sys.stderr, flush=True)
        if once:
            return
        if not is_over:
            time.sleep(pause)
