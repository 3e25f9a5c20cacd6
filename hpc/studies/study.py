"""Starts, follows and shows the runs of a group; `hpc sweep` and `hpc scaling` say which. Runs on the login node.

All state is in the runs and the group's directory, so a study may be killed at any moment and started again.
"""

import dataclasses
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc.base.errors import NotNowError, TorchrelayError, UserError
from hpc.base.files import is_temporary, remove_directory
from hpc.base.text import visible
from hpc.commands import cli
from hpc.run.rundir import RunDir
from hpc.slurm.cancellation import cancel_run
from hpc.status.run_view import StatusCache
from hpc.status.summary import TERMINAL, Summary
from hpc.studies.group import GroupDir, Member, Spec, start_member
from hpc.submissions.options import SubmitOptions, run_verb, split_script
from hpc.submissions.sbatch.sbatch_advice import explain
from hpc.supervise.check import SuperviseOptions, check_runs

_POLL_SECONDS, _SUPERVISE_SECONDS = 5.0, 60.0


@dataclass(frozen=True, kw_only=True)
class ContinueOptions(cli.RunsOptions):
    """Options that continue a sweep or a scaling study."""

    name: str | None = None
    parallel: int | None = None
    once: bool = False


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a group so far."""

    document: Mapping[str, Any]
    """The fields for --json."""
    table: Sequence[Sequence[str]]
    """Rows, the titles first."""
    sentences: Sequence[str]
    problem: str | None
    """Why there is no result; None if there is one, or one may yet come."""


class Study(ABC, Generic[Spec]):
    """Starts and follows the runs of one group. `tell` is called with each message for the user."""

    def __init__(self, group: Any, spec: Spec, tell: Callable[[str], None]) -> None:
        self.group, self.spec, self.tell = group, spec, tell
        self.cache, self._supervised, self._has_begun = StatusCache(), 0.0, False

    @abstractmethod
    def begun(self) -> Sequence[Member]:
        """Return the members that have begun and are not known to have ended."""

    @abstractmethod
    def next_member(self) -> Member | None:
        """Return the next member to start; None if there is none."""

    @abstractmethod
    def refuse(self, member: Member, cause: str) -> None:
        """Record that a member cannot be submitted."""

    @abstractmethod
    def follow(self, member: Member, run: RunDir, summary: Summary) -> None:
        """Record what a member that goes on has reached, and cancel it if it need not go on."""

    @abstractmethod
    def end(self, member: Member, run: RunDir, summary: Summary) -> None:
        """Record and announce that a member has ended."""

    @abstractmethod
    def results(self) -> Results:
        """Return the results so far."""

    def save_result(self) -> None:
        """Write files with the results so far."""
        return

    def step(self) -> bool:
        """Follow the runs, start further ones, and write the results. Return whether the group is over.

        Raises:
            UserError: the first run cannot be submitted.
            TorchrelayError: Slurm does not answer, or further runs cannot be submitted now. The others go on.
        """
        self.cache = StatusCache()  # in an old one, a run that another process just submitted may look failed
        running, left, problem = 0, list[Member](), None
        for member in self.begun():
            run = self.group.run(member.name)
            summary = self.cache.summary(run) if run.spec.exists() else None
            if summary is None or (summary.state == "failed" and summary.job_id is None):
                left.append(member)  # an earlier process was killed before it queued the job, or Slurm refused it
            elif summary.state in TERMINAL:
                self.end(member, run, summary)
            else:
                self.follow(member, run, summary)
                running += 1
        try:
            running += self._start_further(left, running)
        except UserError:
            raise
        except TorchrelayError as error:
            problem = error
        if not self.group.cancelled.exists():
            self._supervise()
        self.save_result()
        if problem:
            raise problem
        return not running

    def _start_further(self, left: Sequence[Member], running: int) -> int:
        """Start the members that are `left` and then new ones, until the group is cancelled. Return their number."""
        started, cancelled = 0, self.group.cancelled
        for member in left:
            started += not cancelled.exists() and self._start(member)
        while running + started < self.spec.parallel and not cancelled.exists() and (new := self.next_member()):
            started += self._start(new)
        return started

    def _start(self, member: Member) -> bool:
        """Submit the run of a member. Return False if it is refused for its own values.

        Raises:
            UserError: the run is refused, and it would be the first.
            TorchrelayError: the run cannot be submitted now.
        """
        run = self.group.run(member.name)
        # The runs that this process has started may have been removed since.
        is_first = not (self._has_begun or cli.all_runs(self.group.path))
        try:
            if start_member(self.group, self.spec, member):
                self.tell(f"{run.name} is submitted{member.values}")
            self._has_begun = True
            self.cache = StatusCache()  # the old one has a queue without the new job
            if self.group.cancelled.exists() and cancel_run(run, self.cache.summary(run).state):
                self.tell(f"{run.name} is cancelled")  # hpc cancel has not seen this run, which was being made
        except NotNowError as error:
            if is_first:
                raise
            raise TorchrelayError(f"{run.name} waits: {error}") from error
        except UserError as error:
            self.refuse(member, str(error))
            if is_first:
                raise
            self.tell(f"{run.name} cannot be submitted{member.values}: {error}")
            return False
        return True

    def _supervise(self) -> None:
        """Restart lost runs, in case no supervisor watches them, at most once a minute."""
        if time.monotonic() - self._supervised < _SUPERVISE_SECONDS:
            return
        if any(run.script.exists() for run in cli.all_runs(self.group.path)):
            self._supervised = time.monotonic()
            for line in check_runs(SuperviseOptions(runs_dir=self.group.path)):
                if line["problem"]:
                    self.tell(f"{line['run']}: {line['action']} ({line['reason']}): {line['problem']}")


def main(
    load: Callable[[], type[Study[Any]]],
    start: Callable[[GroupDir[Any], Any], Any],
    kind: type[GroupDir[Any]],
    options: type[SubmitOptions],
    argv: Sequence[str],
    continued: type[ContinueOptions] = ContinueOptions,
) -> int:
    """Run `hpc sweep` or `hpc scaling`. With a name alone, it continues a group; with other flags, it starts one.

    `load` imports the class of the study, `start` makes the group of these options and returns its spec, and
    `continued` has the flags that continue a group.
    """
    flags, script = split_script(list(argv))
    typed = {word[2:].partition("=")[0].replace("_", "-") for word in flags if word.startswith("-")}
    own = {field.name.replace("_", "-") for field in dataclasses.fields(continued)}
    if not script and "name" in typed and typed <= own:
        return cli.run(partial(_work, load, kind, None), continued, kind.KIND, flags, explain=explain)
    return run_verb(kind.KIND, partial(_work, load, kind, start), options, flags, script)


def _work(
    load: Callable[[], type[Study[Any]]], kind: type[GroupDir[Any]], start: Callable[..., Any] | None, options: Any
) -> int:
    group, study = kind.named(options.name, options.runs_dir), load()
    if start is not None and (options.dry_run or options.wait):
        raise UserError(f"hpc {kind.KIND} has no --dry-run and no --wait: try hpc submit --dry-run with the same flags")
    spec = start(group, options) if start else group.go_on(options)
    out = sys.stderr if options.json else sys.stdout

    def tell(line: str) -> None:
        print(visible(f"{time.strftime('%H:%M:%S')} {line}"), file=out, flush=True)

    if group.cancelled.exists():
        name = group.path.name
        tell(f"{name} is cancelled and starts no runs: hpc {kind.KIND} --name {name} without --once continues it")
    made = study(group, spec, tell)
    _look_after(made, once=options.once, is_new=start is not None)
    return _show(made, as_json=options.json)


def _look_after(study: Study[Any], *, once: bool, is_new: bool) -> None:
    """Let a study work until the group is over; with `once`, let it work once.

    Raises:
        UserError: the first run cannot be submitted. If `is_new`, the directory is removed, unless it has a run.
        TorchrelayError: Slurm does not answer, or refuses a run for now, and `once` is set; without `once`, the study
            tries again.
    """
    group, name = study.group, study.group.path.name
    try:
        if once:
            study.step()
        else:
            cli.repeat(f"hpc {group.KIND}", _POLL_SECONDS, study.step, fatal=UserError)
    except UserError:
        if is_new and not any(is_temporary(path) or RunDir(path).spec.exists() for path in group.path.iterdir()):
            remove_directory(group.path)  # no run was started, and no other process is about to start one
        raise
    except KeyboardInterrupt:
        print(
            f"\nthe runs of {name} continue: type hpc {group.KIND} --name {name} to continue the {group.TITLE}, or "
            f"hpc cancel {name} to stop the runs",
            file=sys.stderr,
        )
        raise


def _show(study: Study[Any], *, as_json: bool) -> int:
    """Print the results so far. Return 1 if there is none, and none may come."""
    group, results = study.group, study.results()
    if as_json:
        cli.print_json({group.KIND: group.path.name, "directory": str(group.path), **results.document})
        return int(results.problem is not None)
    titles, *rows = results.table
    table = Table(*titles, box=None)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
    for line in results.sentences:
        print(visible(line))
    if results.problem is not None:
        print(visible(f"hpc {group.KIND}: {results.problem}"), file=sys.stderr)
    else:
        print(f"next:\n  {visible(f'{cli.own_command()} report {group.path.name}')}")
    return int(results.problem is not None)
