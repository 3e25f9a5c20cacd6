"""`hpc cancel`: end runs; `hpc resume` can continue them, unless --final was given. Runs on the login node."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from hpc.base.errors import TorchrelayError
from hpc.base.text import visible
from hpc.commands import cli
from hpc.run.ownership import check_is_own
from hpc.run.rundir import RunDir
from hpc.slurm.cancellation import cancel_run
from hpc.status.run_view import StatusCache


@dataclass(frozen=True, kw_only=True)
class CancelOptions(cli.RunsOptions):
    """Stop runs and keep them from being requeued. hpc resume continues them from the last saved step."""

    run: Annotated[tuple[str, ...], cli.RUNS] = ()
    """Run directories or names; also those of sweeps and scaling studies."""
    final: bool = False
    """Stop the runs for good: hpc resume refuses to continue them."""


def cancel(options: CancelOptions) -> int:
    """Cancel the runs that are not complete. Returns 1 if a run may still go on."""
    _own_runs(options)  # a wrong name cancels nothing
    for group in filter(None, (cli.find_group(name, options.runs_dir) for name in options.run)):
        (group / cli.CANCELLED_GROUP).touch()
    runs = _own_runs(options)  # only now, because the groups may have started runs until now
    answers, problems = list[dict[str, str]](), list[str]()
    cache = StatusCache()
    for run in runs:
        try:
            before = str(cache.summary(run).state)
            is_new = cancel_run(run, before, final=options.final)
            answers.append({"run": run.name, "run_dir": str(run.path), "state": "cancelled" if is_new else before})
            back = f"and will not be requeued; {cli.own_command()} resume {run.name} continues it"
            done = f"is cancelled {'for good' if options.final else back}" if is_new else f"had already ended: {before}"
            if not options.json:
                print(visible(f"run {run.name} {done}"))
        except TorchrelayError as error:
            problems.append(str(error))
            answers.append({"run": run.name, "run_dir": str(run.path), "error": str(error)})
    if options.json:
        cli.print_json(answers)
    for problem in problems:
        print(f"hpc cancel: {visible(problem)}", file=sys.stderr)
    return int(bool(problems))


def _own_runs(options: CancelOptions) -> list[RunDir]:
    """Return the runs to cancel. Raises UserError if there is none of a name, or it is another user's."""
    runs = cli.find_runs(options.run, options.runs_dir)
    for run in runs:
        check_is_own(run)
    return runs


main = partial(cli.run, cancel, CancelOptions, "cancel")
